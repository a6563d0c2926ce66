"""Packs: frames gathered into blobs of some 64 MiB, sealed, then pushed while the next one fills."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from stasis.store.frame import MAX_STORED
from stasis.store.media import PACK, Buffer, Descriptor, digest_of
from stasis.store.pool import Bytes, Pool
from stasis.store.repository import Repository
from stasis.store.tables import Tables


class Packer:
    """Appends frames to the open pack; sealed packs are hashed and pushed by threads of its own.

    `append` blocks while `packs` of them are open or under way: this bounds memory and passes the repository's pace on.
    A pack is kept until it is durable, so that it can be sent again.
    """

    def __init__(
        self, repo: Repository, tables: Tables, *, pack_bytes: int, packs: int, uploads: int, spill: Path | None
    ) -> None:
        self._repo, self._tables, self._pack_bytes = repo, tables, pack_bytes
        self._pool = Pool(pack_bytes + MAX_STORED, packs, spill)
        self._lock = threading.Lock()
        self._number, self._size = 0, 0
        self._buffer: Bytes | None = None
        self._pending: list[Future[None]] = []
        self._failed = False
        self._threads = ThreadPoolExecutor(uploads, thread_name_prefix="stasis-push")
        self._counting = threading.Lock()
        self.stored = 0
        self.pushed = 0
        self.seconds = {"digest": 0.0, "push": 0.0}

    def warm(self) -> None:
        self._pool.warm()

    def append(self, parts: Sequence[Buffer]) -> tuple[int, int]:
        """(pack, offset) of the frame that the parts make up."""
        with self._lock:
            if self._buffer is None:
                self._buffer = self._pool.take()
                self._number, self._size = self._tables.open_pack(), 0
            offset = self._size
            for part in parts:
                self._buffer[self._size : self._size + len(part)] = np.frombuffer(part, np.uint8)
                self._size += len(part)
            if self._size >= self._pack_bytes:
                self._seal()
            return self._number, offset

    def _seal(self) -> None:
        if self._buffer is not None:
            self.stored += self._size
            self._pending.append(self._threads.submit(self._push, self._number, self._buffer, self._size))
            self._buffer = None

    def _push(self, number: int, buffer: Bytes, size: int) -> None:
        try:
            if self._failed:
                return
            content, start = buffer[:size].data, time.monotonic()
            descriptor = Descriptor(PACK, digest_of(content), size)
            hashed = time.monotonic()
            new = self._repo.push(descriptor, [content])
            self._tables.seal_pack(number, descriptor.digest, size)
            with self._counting:
                self.pushed += new
                self.seconds["digest"] += hashed - start
                self.seconds["push"] += time.monotonic() - hashed
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._pool.give(buffer)

    def fail(self, error: BaseException) -> None:
        """Whoever waits in `append` gets this error."""
        self._failed = True
        self._pool.fail(error)

    def finish(self) -> None:
        """Returns when every pack is durable; raises what stopped one."""
        with self._lock:
            self._seal()
        for future in self._pending:
            future.result()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
