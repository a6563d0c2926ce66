"""What an operation is doing, kept up to date in its checkpoint's status for those who watch."""

from __future__ import annotations

import asyncio
import logging

from lightkube import AsyncClient
from lightkube.types import PatchType

from stasis.controllers import status
from stasis.controllers.operations import News, Operations
from stasis.errors import StasisError
from stasis.kube.client import Checkpoints, meta, translated, unless_changed

log = logging.getLogger(__name__)

INTERVAL = 2.0  # seconds between two writes about an operation


class Progress:
    """`run` until cancelled. Whatever else writes to the status goes first: a write that meets another is left out."""

    def __init__(self, client: AsyncClient, operations: Operations) -> None:
        self._client = client
        self._operations = operations
        self._written: dict[str, News] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            found = {news.op: news for news in self._operations.news()}
            self._written = {op: news for op, news in self._written.items() if op in found}
            for op, news in found.items():
                if self._written.get(op) == news:
                    continue
                try:
                    await self._write(news)
                    self._written[op] = news
                except StasisError as error:
                    log.debug("how far operation %s is was not written: %s", op, error)

    async def _write(self, news: News) -> None:
        home = news.home
        with translated(f"checkpoint {home.namespace}/{home.name}"):
            checkpoint = await self._client.get(Checkpoints, home.name, namespace=home.namespace)
            change = status.under_way(checkpoint, news) if meta(checkpoint)["uid"] == home.uid else None
            if change is not None:
                await self._client.patch(
                    Checkpoints.Status,
                    home.name,
                    unless_changed(checkpoint, change),
                    namespace=home.namespace,
                    patch_type=PatchType.MERGE,
                )
