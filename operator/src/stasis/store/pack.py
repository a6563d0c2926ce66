"""Packs: frames gathered into blobs of some 64 MiB, sealed, then pushed while the next one fills."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from stasis.errors import NoSpace
from stasis.store.media import PACK, Buffer, Descriptor, digest_of
from stasis.store.repository import Repository
from stasis.store.tables import Tables


class Spool:
    """A blob in the making, kept until it is durable so that it can be sent again: in memory, or in an unlinked file
    (mode 0600) where memory is short."""

    def __init__(self, folder: Path | None) -> None:
        self.size = 0
        self._parts: list[Buffer] = []
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0) if folder else None

    def write(self, data: bytes) -> None:
        if self._file is None:
            self._parts.append(data)
        else:
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._file.fileno(), view) :]
            except OSError as error:
                raise NoSpace(f"cannot spill a pack: {error.strerror}") from error
        self.size += len(data)

    def buffers(self) -> Sequence[Buffer]:
        if self._file is not None and self.size:
            return [memoryview(mmap.mmap(self._file.fileno(), self.size, prot=mmap.PROT_READ))]
        return self._parts

    def close(self) -> None:
        self._parts = []
        if self._file is not None:
            self._file.close()


class Packer:
    """Appends frames to the open pack; sealed packs are hashed and pushed by threads of its own.

    `append` blocks while `slots` packs are open or under way: this bounds memory and passes the repository's pace on.
    """

    def __init__(
        self, repo: Repository, tables: Tables, *, pack_bytes: int, slots: int, uploads: int, spill: Path | None
    ) -> None:
        self._repo, self._tables, self._pack_bytes, self._spill = repo, tables, pack_bytes, spill
        self._change = threading.Condition()
        self._slots = slots
        self._open: tuple[int, Spool] | None = None
        self._pending: list[Future[None]] = []
        self._error: BaseException | None = None
        self._threads = ThreadPoolExecutor(uploads, thread_name_prefix="stasis-push")
        self.stored = 0
        self.pushed = 0
        self.seconds = {"digest": 0.0, "push": 0.0}

    def append(self, stored: bytes) -> tuple[int, int]:
        """(pack, offset) of the frame."""
        with self._change:
            while not self._open and not self._slots and not self._error:
                self._change.wait()
            if self._error:
                raise self._error
            if not self._open:
                self._slots -= 1
                self._open = self._tables.open_pack(), Spool(self._spill)
            number, spool = self._open
            offset = spool.size
            spool.write(stored)
            self.stored += len(stored)
            if spool.size >= self._pack_bytes:
                self._seal()
            return number, offset

    def _seal(self) -> None:
        if self._open:
            self._pending.append(self._threads.submit(self._push, *self._open))
            self._open = None

    def _push(self, number: int, spool: Spool) -> None:
        try:
            if self._error:
                return
            buffers, start = spool.buffers(), time.monotonic()
            descriptor = Descriptor(PACK, digest_of(*buffers), spool.size)
            hashed = time.monotonic()
            new = self._repo.push(descriptor, buffers)
            self._tables.seal_pack(number, descriptor.digest, descriptor.size)
            with self._change:
                self.pushed += new
                self.seconds["digest"] += hashed - start
                self.seconds["push"] += time.monotonic() - hashed
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            spool.close()
            with self._change:
                self._slots += 1
                self._change.notify_all()

    def fail(self, error: BaseException) -> None:
        """Whoever waits in `append` gets this error."""
        with self._change:
            self._error = self._error or error
            self._change.notify_all()

    def finish(self) -> None:
        """Returns when every pack is durable; raises what stopped one."""
        with self._change:
            self._seal()
        for future in self._pending:
            future.result()
        self.close()

    def close(self) -> None:
        with self._change:
            if self._open:
                self._open[1].close()
                self._open = None
        self._threads.shutdown(wait=True, cancel_futures=True)
