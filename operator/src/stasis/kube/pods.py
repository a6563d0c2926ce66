"""The pods of enabled jobs: our own list and watch, with a label selector that kopf does not have."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx2
from lightkube import AsyncClient

from stasis.kube.client import Pods, meta, status_code

log = logging.getLogger(__name__)

CHUNK = 200  # objects asked for at once: a list's peak of memory stays with the process
PATIENCE = 300.0  # seconds
RETRY = 1.0


class PodWatch:
    """`changed(pod, deleted)` is told every pod with the label `label`, and each change; after a gap also those that
    are there still, and as deleted those that are no more."""

    def __init__(self, client: AsyncClient, label: str, changed: Callable[[Any, bool], None]) -> None:
        self._client = client
        self._label = label
        self._changed = changed
        self._known: dict[str, tuple[str, str]] = {}  # UID -> namespace, name
        self.listed = asyncio.Event()
        self.heard_at = time.monotonic()

    async def run(self) -> None:
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
            except httpx2.HTTPError as error:
                if status_code(error) != 410:  # the version is too old: list again
                    log.warning("watching pods: %s; again in %.0f s", error or type(error).__name__, RETRY)
                    await asyncio.sleep(RETRY)

    async def _list(self) -> str:
        gone = dict(self._known)
        found = self._client.list(Pods, namespace="*", labels={self._label: None}, chunk_size=CHUNK)
        async for pod in found:
            gone.pop(meta(pod)["uid"], None)
            self._tell(pod, False)
        for uid, (namespace, name) in gone.items():
            self._tell({"metadata": {"uid": uid, "namespace": namespace, "name": name}}, True)
        self.listed.set()
        return str(found.resourceVersion)

    async def _watch(self, version: str) -> str:
        """Until nothing was heard for a while: a connection can die silently."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE) as patience:
                async for event, pod in self._client.watch(
                    Pods, namespace="*", labels={self._label: None}, resource_version=version
                ):
                    version = str(meta(pod)["resourceVersion"])
                    self._tell(pod, event == "DELETED")
                    patience.reschedule(loop.time() + PATIENCE)
        except TimeoutError:
            self.heard_at = time.monotonic()
        return version

    def _tell(self, pod: Any, deleted: bool) -> None:
        about = meta(pod)
        if deleted:
            self._known.pop(about["uid"], None)
        else:
            self._known[about["uid"]] = (about["namespace"], about["name"])
        self.heard_at = time.monotonic()
        self._changed(pod, deleted)
