"""What the agent serves: the controller over mutual TLS, kubelet and everybody in plain HTTP, each on its port."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import WSMsgType, web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from stasis import errors
from stasis.core.frames import Answer, Command, Forget, Frame, frame_from_dict
from stasis.core.messages import coordinator_address
from stasis.daemon import preflight
from stasis.daemon.certificates import CONTROLLER, common_name
from stasis.daemon.metrics import Metrics
from stasis.daemon.ranks import Ranks
from stasis.daemon.uploads import Uploads
from stasis.errors import StasisError, UsageError

log = logging.getLogger(__name__)

MAX_FRAME = 64 << 20  # bytes: an order names every connection of a rank
BACKLOG = 1000  # frames that wait for a slow controller; further ones are dropped, and repeated by the machines
HEARTBEAT = 10.0  # seconds
HELD = 10.0  # seconds in which a release that is recorded reaches its rank

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """Those of controllers, by the coordinators that speak over them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinators: dict[str, asyncio.Queue[Frame]] = {}
        self._operations: dict[str, asyncio.Queue[Frame]] = {}

    def note(self, command: Command, queue: asyncio.Queue[Frame]) -> None:
        """Answers to this coordinator go where it spoke last."""
        self._coordinators[coordinator_address(command.message.op, command.message.epoch)] = queue
        self._operations[command.message.op] = queue

    def drop(self, queue: asyncio.Queue[Frame]) -> None:
        for table in (self._coordinators, self._operations):
            for name in [name for name, known in table.items() if known is queue]:
                del table[name]

    def forget(self, op: str) -> None:
        self._operations.pop(op, None)
        for name in [name for name in self._coordinators if name.rpartition("@")[0] == op]:
            del self._coordinators[name]

    def send(self, frame: Frame) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._send, frame)
        except RuntimeError:  # the loop is closed
            pass

    def _send(self, frame: Frame) -> None:
        if isinstance(frame, Answer):
            queue = self._coordinators.get(frame.to)
        else:
            queue = self._operations.get(frame.op) if not isinstance(frame, Command) else None
        if queue is not None and queue.qsize() < BACKLOG:
            queue.put_nowait(frame)


class Server:
    def __init__(
        self, ranks: Ranks, uploads: Uploads, connections: Connections, metrics: Metrics, node: dict[str, Any]
    ) -> None:
        """`node`: what /v1/status tells of it."""
        self._ranks = ranks
        self._uploads = uploads
        self._connections = connections
        self._metrics = metrics
        self._node = node
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="orders")  # one after the other, as they came
        self._others = ThreadPoolExecutor(8, thread_name_prefix="serve")

    def close(self) -> None:
        for pool in (self._orders, self._others):
            pool.shutdown(wait=False, cancel_futures=True)

    def controllers(self) -> web.Application:
        """For port 9443."""
        app = web.Application(middlewares=[_only_the_controller, _as_json], client_max_size=1 << 20)
        app.router.add_get("/v1/gang", self._gang)
        app.router.add_get("/v1/status", self._status)
        app.router.add_post("/v1/check", self._check)
        app.router.add_post("/v1/word", self._word)
        app.router.add_post("/v1/upload", self._upload)
        return app

    def kubelet(self) -> web.Application:
        """For port 9480 of the loopback."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/prestop/{id}", self._prestop)
        return app

    def everybody(self) -> web.Application:
        """For port 9481: Prometheus, and `kubectl stasis doctor` through the API server."""
        app = web.Application()
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/v1/status", self._public_status)
        return app

    # ------------------------------------------------------------ the controller

    async def _gang(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MAX_FRAME)
        await socket.prepare(request)
        queue: asyncio.Queue[Frame] = asyncio.Queue()
        writer = asyncio.create_task(_write(socket, queue))
        self._metrics.connections.inc()
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await self._take(message.data, queue)
        finally:
            self._metrics.connections.dec()
            writer.cancel()
            self._connections.drop(queue)
        return socket

    async def _take(self, text: str, queue: asyncio.Queue[Frame]) -> None:
        try:
            frame = frame_from_dict(json.loads(text))
            if isinstance(frame, Command):
                self._connections.note(frame, queue)
                await self._in(self._orders, self._ranks.deliver, frame)
            elif isinstance(frame, Forget):
                await self._in(self._orders, self._ranks.forget, frame.op)
                self._connections.forget(frame.op)
            else:
                raise UsageError(f"a frame that only agents send: {frame}")
        except (ValueError, StasisError) as error:
            log.warning("a frame was not taken: %s", error)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({**self._node, "ranks": self._ranks.report()})

    async def _public_status(self, request: web.Request) -> web.Response:
        """Without names of jobs."""
        ranks = [{"kind": rank["kind"], "state": rank["state"]} for rank in self._ranks.report()]
        return web.json_response({**self._node, "ranks": ranks})

    async def _check(self, request: web.Request) -> web.Response:
        return web.json_response(await self._in(self._others, preflight.check, await _body(request)))

    async def _word(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if (rank := self._ranks.at_work(body.get("container_id", ""))) is not None:
            raise UsageError(f"operation {rank.op} is at work in this container")
        await self._in(self._others, preflight.word, body)
        return web.json_response({})

    async def _upload(self, request: web.Request) -> web.Response:
        return web.json_response(await self._in(self._others, self._uploads.ask, await _body(request)))

    # ------------------------------------------------------------ the node

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        self._ranks.count()
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _prestop(self, request: web.Request) -> web.Response:
        answer = await self._released(request.match_info["id"])
        self._metrics.prestop.labels(answer).inc()
        log.info("preStop: %s", answer, extra={"pod": request.match_info["id"]})
        return web.Response(text=answer + "\n")

    async def _released(self, pod_id: str) -> str:
        releases = self._ranks.releases
        try:
            rank = await self._in(self._others, self._ranks.of_pod, pod_id)
        except StasisError as error:
            log.warning("whether a release is recorded is not known: %s", error)
            return "unknown"
        if rank is None:
            return "nothing to wait for"
        end = asyncio.get_running_loop().time() + HELD
        while not releases.holds(rank.key) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        return await asyncio.wrap_future(releases.asked(rank.key))

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)


async def _write(socket: web.WebSocketResponse, queue: asyncio.Queue[Frame]) -> None:
    while True:
        frame = await queue.get()
        try:
            await socket.send_str(json.dumps(frame.to_dict()))
        except ConnectionError:
            return


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise UsageError(f"the request's body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError("the request's body is no JSON object")
    return body


@web.middleware
async def _only_the_controller(request: web.Request, handler: Handler) -> web.StreamResponse:
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    if common_name(certificate) != CONTROLLER:
        raise web.HTTPForbidden(text=f"only {CONTROLLER} may ask this\n")
    return await handler(request)


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of ours as JSON."""
    try:
        return await handler(request)
    except StasisError as error:
        status = 404 if isinstance(error, errors.NotFound) else 400 if isinstance(error, UsageError) else 500
        body = {"reason": error.reason, "message": error.message, "remedy": error.remedy}
        return web.json_response(body, status=status)
