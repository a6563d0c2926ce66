"""The webhook's server: HTTPS for the API server, and plain HTTP for probes and Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from lightkube import AsyncClient
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from stasis.api.names import UNPREPARED
from stasis.errors import StasisError, UsageError
from stasis.webhook.certificate import Certificate
from stasis.webhook.cluster import Cluster
from stasis.webhook.images import Images
from stasis.webhook.jobsets import jobsets
from stasis.webhook.metrics import Metrics
from stasis.webhook.pods import Pods
from stasis.webhook.review import Answer, Request
from stasis.webhook.settings import Settings
from stasis.webhook.trainjobs import trainjobs

_LARGEST = 16 << 20  # bytes of a review: an object and what it was
_PATIENCE = 8.0  # seconds; the API server waits for 10
_DRAIN = 5.0  # seconds from TERM until nothing is sent here any more
log = logging.getLogger(__name__)
Admit = Callable[[Request], Awaitable[Answer]]


class Server:
    def __init__(self, settings: Settings, client: AsyncClient) -> None:
        cluster = Cluster(client)
        pods = Pods(cluster, Images(settings.plain_http), settings)
        self._settings = settings
        self._certificate = Certificate(settings.certificates)
        self._metrics = Metrics()
        self._stopping = False

        async def admit_jobset(request: Request) -> Answer:
            return jobsets(request)

        async def admit_trainjob(request: Request) -> Answer:
            return await trainjobs(request, cluster)

        self._paths: dict[str, Admit] = {"/trainjobs": admit_trainjob, "/jobsets": admit_jobset, "/pods": pods}

    async def run(self) -> None:
        """Until TERM or INT."""
        stop = asyncio.Event()
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, stop.set)
        async with self._serving():
            await stop.wait()
            self._stopping = True
            log.info("stopping")
            await asyncio.sleep(_DRAIN)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        settings, certificate = self._settings, self._certificate
        certificate.look()
        watch = asyncio.create_task(certificate.watch())
        async with contextlib.AsyncExitStack() as running:
            running.callback(watch.cancel)
            for app, port, tls in (
                (self._plain(), settings.metrics_port, None),
                (self._admission(), settings.port, certificate.context),
            ):
                runner = web.AppRunner(app, access_log=None, shutdown_timeout=_PATIENCE)
                await runner.setup()
                running.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, settings.address or None, port, ssl_context=tls).start()
            log.info("serving", extra={"port": settings.port, "metrics_port": settings.metrics_port})
            yield

    def _admission(self) -> web.Application:
        app = web.Application(client_max_size=_LARGEST)
        for path in self._paths:
            app.router.add_post(path, self._review)
        return app

    def _plain(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._expose)
        return app

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self._stopping or not self._certificate.loaded:
            return web.Response(status=503, text="stopping\n" if self._stopping else "no certificate\n")
        return web.Response(text="ok\n")

    async def _expose(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _review(self, http: web.Request) -> web.Response:
        begun = time.monotonic()
        try:
            request = Request.of(json.loads(await http.read()))
        except (ValueError, RecursionError, UsageError) as error:
            return web.Response(status=400, text=f"{error}\n")
        result = "error"
        try:
            answer = await asyncio.wait_for(self._paths[http.path](request), _PATIENCE)
            result = "denied" if answer.denied else "allowed"
        except (StasisError, TimeoutError) as error:  # whoever asks tries again
            answer = Answer(denied=f"stasis cannot decide now: {error or type(error).__name__}")
        except Exception:
            log.exception("admission failed", extra=_who(request))
            raise
        finally:
            self._metrics.seconds.labels(http.path, result).observe(time.monotonic() - begun)
        self._tell(request, answer, result)
        return web.json_response(answer.review(request))

    def _tell(self, request: Request, answer: Answer, result: str) -> None:
        if answer.notes.get("deferred"):
            self._metrics.deferred.inc()
        if UNPREPARED in answer.notes:
            self._metrics.unprepared.inc()
        fields = {**_who(request), "result": result, **answer.notes}
        if answer.denied:
            log.warning("denied", extra=fields | {"reason": answer.denied})
        elif answer.notes:
            log.info("admitted", extra=fields)


def _who(request: Request) -> dict[str, Any]:
    metadata = request.object.get("metadata") or {}
    name = request.name or f"{metadata.get('generateName', '')}*"
    return {"kind": request.kind, "namespace": request.namespace, "job": name, "operation": request.operation}
