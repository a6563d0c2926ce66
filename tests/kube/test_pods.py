"""Our own list and watch of pods, over a connection that breaks: what happened meanwhile is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from lightkube import Client
from tests.support.apiserver import ApiServer

from stasis.api import names
from stasis.kube.client import Pods, configuration, connect_async, meta
from stasis.kube.pods import PodWatch

pytestmark = pytest.mark.kube


class Line:
    """The network between a client and the API server, which can be cut."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._ends: set[asyncio.StreamWriter] = set()
        self.whole = True
        self.refused = 0

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[int]:
        """The port of its end."""
        listening = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield listening.sockets[0].getsockname()[1]
        finally:
            self.cut()
            listening.close()

    def cut(self) -> None:
        self.whole = False
        for end in self._ends:
            end.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.whole:
            self.refused += 1
            writer.transport.abort()
            return
        there = await asyncio.open_connection(self._server.hostname, self._server.port)
        ends = {writer, there[1]}
        self._ends |= ends
        await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))
        self._ends -= ends


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not seen():
            await asyncio.sleep(0.02)


def make(client: Client, namespace: str, name: str) -> None:
    about = {"name": name, "namespace": namespace, "labels": {names.POLICY_LABEL: namespace}}
    spec = {"containers": [{"name": "node", "image": "i"}], "terminationGracePeriodSeconds": 0}
    client.create(Pods.from_dict({"metadata": about, "spec": spec}))


def test_a_pod_that_went_while_the_watch_was_broken_is_told_as_deleted(
    api: ApiServer, client: Client, namespace: str, tmp_path: Path
) -> None:
    there: dict[str, str] = {}

    def changed(pod: Any, deleted: bool) -> None:
        if meta(pod)["namespace"] != namespace:
            return
        if deleted:
            del there[meta(pod)["uid"]]
        else:
            there[meta(pod)["uid"]] = meta(pod)["name"]

    async def story() -> None:
        line = Line(api.url)
        async with line.laid() as port:
            kubeconfig = tmp_path / "kubeconfig"
            text = api.kubeconfig_of("controller").read_text()
            kubeconfig.write_text(text.replace(api.url, f"https://127.0.0.1:{port}"))
            watch = PodWatch(connect_async(configuration(kubeconfig)), names.POLICY_LABEL, changed)
            watching = asyncio.create_task(watch.run())
            await until(lambda: set(there.values()) == {"stays", "goes", "again"})
            await asyncio.to_thread(make, client, namespace, "seen-by-the-watch")
            await until(lambda: "seen-by-the-watch" in there.values())

            line.cut()
            await asyncio.to_thread(client.delete, Pods, "goes", namespace=namespace)
            await asyncio.to_thread(client.delete, Pods, "again", namespace=namespace)
            await asyncio.to_thread(make, client, namespace, "again")
            await asyncio.to_thread(make, client, namespace, "comes")
            await until(lambda: line.refused)
            line.whole = True
            await until(lambda: set(there.values()) == {"stays", "seen-by-the-watch", "again", "comes"})
            assert len(there) == 4, "the pod made anew under its name is told once"
            watching.cancel()

    for name in ("stays", "goes", "again"):
        make(client, namespace, name)
    asyncio.run(story())
