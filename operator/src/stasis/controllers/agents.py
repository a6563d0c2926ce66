"""The connections to the nodes' agents: one WebSocket a node, under mutual TLS, open while something is to say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import aiohttp

from stasis.core.frames import Answer, Frame, Progress, frame_from_dict
from stasis.errors import StasisError, Unavailable

log = logging.getLogger(__name__)

SERVER_NAME = "agent.stasis.dev"  # in every agent's certificate
MAX_FRAME = 64 << 20  # bytes
BACKLOG = 1000  # frames that wait for a node; older ones are dropped, the machines repeat what matters
HEARTBEAT = 10.0  # seconds
IDLE = 300.0  # seconds after which a connection is closed
FIRST_RETRY, LAST_RETRY = 0.2, 5.0
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=5.0, sock_connect=5.0)
CALL_TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class Agents:
    """`address(node)` is None for a node that is not there; `tls()` the context to connect with; both are asked for
    each connection anew. What agents say goes to `told`. Any thread may call `send`; all else is for one loop."""

    def __init__(
        self,
        address: Callable[[str], str | None],
        tls: Callable[[], ssl.SSLContext],
        told: Callable[[Answer | Progress], None],
        port: int,
    ) -> None:
        self._address = address
        self._tls = tls
        self._told = told
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(timeout=TIMEOUT)
        self._links: dict[str, _Link] = {}

    def send(self, node: str, frame: Frame) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, node, frame)

    def _send(self, node: str, frame: Frame) -> None:
        if self._session.closed:
            return
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = _Link(self, node)
        link.send(frame)

    def url(self, node: str, scheme: str, path: str) -> str:
        address = self._address(node)
        if address is None:
            raise Unavailable(f"node {node} is not there")
        host = f"[{address}]" if ":" in address else address
        return f"{scheme}://{host}:{self._port}{path}"

    async def connect(self, node: str) -> aiohttp.ClientWebSocketResponse:
        return await self._session.ws_connect(
            self.url(node, "wss", "/v1/gang"),
            ssl=self._tls(),
            server_hostname=SERVER_NAME,
            heartbeat=HEARTBEAT,
            max_msg_size=MAX_FRAME,
        )

    async def post(self, node: str, path: str, body: dict[str, Any]) -> Any:
        """Ask a node's agent something. Raises Unavailable, or StasisError with the agent's words."""
        try:
            async with self._session.post(
                self.url(node, "https", path),
                json=body,
                ssl=self._tls(),
                server_hostname=SERVER_NAME,
                timeout=CALL_TIMEOUT,
            ) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise _refusal(node, text)
                return json.loads(text)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unavailable(f"the agent of node {node}: {error or type(error).__name__}") from error

    def hear(self, text: str, node: str) -> None:
        try:
            frame = frame_from_dict(json.loads(text))
        except (ValueError, StasisError) as error:
            log.warning("node %s: %s", node, error)
            return
        if isinstance(frame, Answer | Progress):
            self._told(frame)

    async def close(self) -> None:
        for link in self._links.values():
            link.task.cancel()
        await asyncio.gather(*(link.task for link in self._links.values()), return_exceptions=True)
        await self._session.close()


def _refusal(node: str, text: str) -> StasisError:
    """Of what an agent answered in place of what it was asked for."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        words = json.loads(text)
        return StasisError(f"node {node}: {words['message']}", remedy=str(words["remedy"]))
    return StasisError(f"the agent of node {node}: {text[:500]}")


class _Link:
    """One node's connection, made anew when it is lost."""

    def __init__(self, agents: Agents, node: str) -> None:
        self._agents = agents
        self._node = node
        self._frames: deque[Frame] = deque(maxlen=BACKLOG)
        self._bell = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"agent:{node}")

    def send(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._bell.set()

    async def _run(self) -> None:
        wait = FIRST_RETRY
        while True:
            await self._bell.wait()
            try:
                socket = await self._agents.connect(self._node)
            except (aiohttp.ClientError, StasisError, TimeoutError, OSError) as error:
                log.warning("node %s: no connection to its agent: %s", self._node, error or type(error).__name__)
                await asyncio.sleep(wait)
                if wait == LAST_RETRY:  # what still matters is said again: a node that is gone is not called for ever
                    self._frames.clear()
                    self._bell.clear()
                wait = min(LAST_RETRY, wait * 2)
                continue
            wait = FIRST_RETRY
            writer = asyncio.create_task(self._write(socket))
            try:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        self._agents.hear(message.data, self._node)
            finally:
                writer.cancel()
                await socket.close()

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                while self._frames:
                    await socket.send_json(self._frames[0].to_dict())
                    self._frames.popleft()
                self._bell.clear()
                async with asyncio.timeout(IDLE):
                    await self._bell.wait()
        except TimeoutError:
            await socket.close()
        except (ConnectionError, aiohttp.ClientError):
            pass  # the reader sees it too
