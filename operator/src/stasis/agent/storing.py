"""Storing what was captured of one rank. Opened before the freeze, so that what can fail or take time early does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stasis.agent.capture import Captured
from stasis.agent.node import Job
from stasis.core.rankconfig import AREA_PREFIX, IMAGE_PREFIX, INIT_STREAM, RankConfig
from stasis.errors import Corrupt, NotFound
from stasis.store.connect import open_repository
from stasis.store.media import Descriptor
from stasis.store.reader import RankReader
from stasis.store.reference import Reference
from stasis.store.repository import Repository
from stasis.store.writer import RankWriter, StoreOptions

MEMORY = 256 << 20  # bytes that storing one rank may take
PACK = 32 << 20  # small enough for several to be under way in that memory


class Storing:
    """One rank's writer, its memory touched and its parent looked up. Raises StoreError where the store cannot be used.

    A parent that is gone or damaged is no parent: everything is stored anew. What a folder gets of a tree that stays
    frozen until then is not compressed: the disk takes it faster than a processor makes it smaller.
    """

    def __init__(self, job: Job, store: str, progress: Callable[[int], None] | None) -> None:
        """`store`: the repository that it is written to."""
        hurry = job.releases and Reference.parse(store).path is not None
        with contextlib.ExitStack() as opened:
            repository = opened.enter_context(open_repository(store))
            self._writer = RankWriter(
                repository,
                uid=job.uid,
                rank=job.rank,
                parent=_parent(repository, job.parent),
                options=StoreOptions(memory_bytes=MEMORY, pack_bytes=PACK, compress=not hurry),
                progress=progress,
            )
            opened.callback(self._writer.abort)
            self._writer.warm()
            self._opened = opened.pop_all()

    def write(
        self,
        captured: Captured,
        init: bytes,
        config: Callable[[], RankConfig],
        announce: Callable[[Descriptor], None],
    ) -> dict[str, Any]:
        """Store all streams, and the build of init; durable and verified when this returns. `config` is asked for when
        they are through, `announce` is told the manifest before it is in the store."""
        named: list[tuple[str, Callable[[], Iterable[memoryview]]]]
        named = [(IMAGE_PREFIX + name, stream.pieces) for name, stream in captured.images.items()]
        named += [(AREA_PREFIX + name, pieces) for name, pieces in captured.areas.items()]
        named.append((INIT_STREAM, lambda: [memoryview(init)]))
        named.sort(key=lambda item: not item[0].startswith(f"{IMAGE_PREFIX}pages-"))  # the long ones first
        with ThreadPoolExecutor(4, thread_name_prefix="store") as pool:
            for done in [pool.submit(self._writer.add, name, pieces()) for name, pieces in named]:
                done.result()
        result = self._writer.finish(config().to_dict(), announce=announce)
        return {"manifest": result.manifest.digest, "size": result.manifest.size, "stats": vars(result.stats)}

    def close(self) -> None:
        """What was not finished is given up."""
        self._opened.close()


def _parent(repository: Repository, digest: str) -> RankReader | None:
    if not digest:
        return None
    try:
        return RankReader(repository, digest)
    except (NotFound, Corrupt):
        return None
