"""The controller's parts, put together: watches that always run, work that only the leader does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import kopf
from aiohttp import web
from lightkube.config.kubeconfig import SingleConfig
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from stasis.api import names
from stasis.controllers import reconcile, watches
from stasis.controllers.agents import Agents
from stasis.controllers.certificates import LOOK, Certificates, client_context, read_folder
from stasis.controllers.events import Teller
from stasis.controllers.metrics import Metrics
from stasis.controllers.operations import Operations
from stasis.controllers.progress import Progress
from stasis.controllers.seen import Key, Seen
from stasis.controllers.settings import Settings
from stasis.errors import StasisError
from stasis.kube.client import connect, connect_async
from stasis.kube.lease import GIVE_UP, Lease
from stasis.kube.pods import PATIENCE, PodWatch
from stasis.kube.queue import WorkQueue

log = logging.getLogger(__name__)

LEASE = "stasis-controller"
RETRY = 5.0  # seconds
SILENT = 3 * PATIENCE  # seconds without a word from our watch after which we are to be restarted


class Controller:
    """`run` returns when `stop` is called. Several can run in one process: they are as far apart as in two."""

    def __init__(self, settings: Settings, config: SingleConfig) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.client = connect_async(config)
        self.blocking = connect(config)
        self.metrics = Metrics()
        identity = f"{settings.identity}-{secrets.token_hex(4)}"
        seconds = settings.lease_seconds
        self.lease = Lease(
            self.client,
            settings.namespace,
            LEASE,
            identity,
            duration=seconds,
            renew=settings.lease_retry,
            give_up=seconds * GIVE_UP / 15,
        )
        self.queue: WorkQueue[Key] = WorkQueue(self._work)
        self.seen = Seen(self.queue.add)
        self._certificates = Certificates(
            self.client, settings.namespace, webhook=settings.webhook_certificate == "managed"
        )
        self.agents = Agents(
            self.seen.nodes.get, self._tls, lambda frame: self.operations.hear(frame), settings.agent_port
        )
        self.operations = Operations(self.blocking, self.agents, self.lease.next_epoch)
        self._reconciler = reconcile.Reconciler(
            self.client,
            self.seen,
            self.operations,
            self.agents,
            Teller(self.client, identity),
            reconcile.Settings(settings.repository),
            self._again,
            self.metrics,
        )
        self.pods = PodWatch(self.client, names.POLICY_LABEL, self.seen.pod)
        self.leads = False

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.agents.close)
            stack.callback(self.operations.stop)
            await stack.enter_async_context(self._serving())
            kopf_done: asyncio.Task[Any] = asyncio.create_task(
                kopf.operator(
                    registry=watches.registry(self.seen),
                    settings=watches.settings(),
                    clusterwide=True,
                    identity=self._settings.identity,  # type: ignore[arg-type]  # else it needs a user of that name
                    stop_flag=self._stop,
                )
            )
            parts = (self.pods.run(), self._lead())
            tasks: list[asyncio.Task[Any]] = [kopf_done, *(asyncio.create_task(part) for part in parts)]
            stopped = asyncio.create_task(self._stop.wait())
            try:
                done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._stop.set()
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.gather(*tasks, stopped, return_exceptions=True)
            for task in done - {stopped}:
                task.result()

    async def _lead(self) -> None:
        while True:
            await self.lease.acquire()
            self.leads = True
            self.metrics.leader.set(1)
            parts = (self.lease.hold(), self.queue.run(), self._certify(), Progress(self.client, self.operations).run())
            tasks: list[asyncio.Task[None]] = [asyncio.create_task(part) for part in parts]
            try:
                for key in self.seen.keys():  # noqa: SIM118
                    self.queue.add(key)
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self.leads = False
                self.metrics.leader.set(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.operations.stop()
                await self.lease.release()

    async def _certify(self) -> None:
        while self._settings.certificates is None:
            try:
                await self._certificates.ensure()
                wait = LOOK
            except StasisError as trouble:
                log.warning("certificates: %s", trouble)
                wait = RETRY
            await asyncio.sleep(wait)
        await asyncio.Event().wait()

    def _tls(self) -> ssl.SSLContext:
        if self._settings.certificates is None:
            return self._certificates.context()
        return client_context(read_folder(self._settings.certificates))

    async def _work(self, key: Key) -> float | None:
        return await self._reconciler.work(key)

    def _again(self, key: Key) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.queue.add, key)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/healthz", _answer(lambda: time.monotonic() - self.pods.heard_at < SILENT))
        app.router.add_get("/readyz", _answer(self.pods.listed.is_set))
        app.router.add_get("/metrics", self._serve_metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, None, self._settings.http_port).start()
            yield
        finally:
            await runner.cleanup()

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        metrics, now = self.metrics, time.time()
        metrics.queue.set(len(self.queue))
        jobs, pods = self.seen.count()
        metrics.jobs.set(jobs)
        metrics.pods.set(pods)
        metrics.heard.set(time.monotonic() - max(self.seen.heard_at, self.pods.heard_at))
        if (certificate := self._certificates.expiry) is not None:
            metrics.certificate.set(certificate)
        metrics.deferred.clear()
        metrics.not_durable.clear()
        if self.leads:
            for key, since in self.seen.not_durable():
                metrics.not_durable.labels(*key).set(now - since)
            for key, since in self.seen.deferred():
                metrics.deferred.labels(*key).set(now - since)
        metrics.operations.clear()
        metrics.frozen.clear()
        for standing in self.operations.standing():
            metrics.operations.labels(standing.kind, standing.step).inc()
            if standing.frozen is not None:
                metrics.frozen.labels(standing.namespace, standing.trainjob).set(standing.frozen)
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(good: Callable[[], bool]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="ok\n") if good() else web.Response(status=503, text="not yet\n")

    return answer
