"""Taking a stream out of a pipe: by reference, by copy into memory, or into an unlinked file.

CRIU vmsplices the pages of a frozen process into its image pipes. Splicing on into pipes of our own (`Held`) keeps
references and copies nothing: valid only while the process stays frozen, and worth it only where it dies afterwards.
A process that goes on is copied into memory that was faulted in beforehand (`Copied`), or into a file where memory
is short (`Spilled`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from stasis.agent.descriptors import shelved

MIB = 1 << 20
PIPE_BYTES = MIB  # the largest pipe that needs no privilege


def enlarge(fd: int) -> None:
    """Give a pipe its largest size; a kernel that refuses (pipe-user-pages-soft) leaves it slow, not wrong."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except PermissionError:
        pass


class Stream(Protocol):
    """The bytes of one image: taken from a pipe once, given out once."""

    def take(self, fd: int) -> None:
        """Take everything from the pipe `fd` up to its end; closes it."""

    def pieces(self) -> Iterator[memoryview]:
        """Give the bytes out in order; each piece is valid until the next one is asked for."""

    def close(self) -> None:
        """Forget what was not given out."""

    @property
    def size(self) -> int: ...


class Held:
    """References to pages, in a row of pipes of 1 MiB each."""

    def __init__(self) -> None:
        self._pipes: list[tuple[int, int]] = []  # read end, bytes inside
        self.size = 0

    def take(self, fd: int) -> None:
        try:
            while self._fill(fd):
                pass
        finally:
            os.close(fd)

    def _fill(self, fd: int) -> bool:
        """Fill one more pipe; False at the end of the stream."""
        read, write = os.pipe()
        inside = 0
        try:
            enlarge(write)
            room = select.poll()
            room.register(write, select.POLLOUT)
            data = select.poll()
            data.register(fd, select.POLLIN)
            more = True
            while more:
                data.poll()
                if not room.poll(0):  # every slot holds a reference; splicing now would block for ever
                    break
                got = os.splice(fd, write, PIPE_BYTES)
                inside += got
                more = got > 0
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        if inside:
            self._pipes.append((shelved(read), inside))
            self.size += inside
        else:
            os.close(read)
        return more

    def pieces(self) -> Iterator[memoryview]:
        buffer = memoryview(mmap.mmap(-1, PIPE_BYTES))
        while self._pipes:
            read, inside = self._pipes[0]
            done = 0
            while done < inside:
                done += os.readv(read, [buffer[done:inside]])
            self._pipes.pop(0)
            os.close(read)
            yield buffer[:inside]

    def close(self) -> None:
        for read, _ in self._pipes:
            os.close(read)
        self._pipes.clear()


class Buffers:
    """Memory of one rank's checkpoint, faulted in before the freeze in pieces of `CHUNK` bytes."""

    CHUNK = 8 * MIB  # each image takes whole ones, and what was not foreseen is faulted in while the tree is frozen

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def reserve(self, size: int) -> None:
        """Have at least `size` bytes ready."""
        while len(self._free) * self.CHUNK < size:
            self._free.append(self._new())

    def _new(self) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return mmap.mmap(-1, self.CHUNK, flags=flags)

    def get(self) -> mmap.mmap:
        return self._free.pop() if self._free else self._new()

    def give_back(self, chunk: mmap.mmap) -> None:
        self._free.append(chunk)

    def trim(self) -> None:
        """Give all free memory back to the system."""
        for chunk in self._free:
            chunk.close()
        self._free.clear()


class Copied:
    """A copy in memory."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._chunks: list[mmap.mmap] = []
        self.size = 0

    def take(self, fd: int) -> None:
        try:
            while True:
                chunk = self._buffers.get()
                self._chunks.append(chunk)
                view = memoryview(chunk)
                inside = 0
                try:
                    while inside < len(view):
                        got = os.readv(fd, [view[inside : inside + 4 * MIB]])
                        if got == 0:
                            return
                        inside += got
                        self.size += got
                finally:
                    view.release()
        finally:
            os.close(fd)

    def put(self, pieces: Iterable[memoryview]) -> None:
        """Copy pieces that come from elsewhere than a pipe."""
        for piece in pieces:
            done = 0
            while done < len(piece):
                start = self.size % Buffers.CHUNK
                if start == 0:
                    self._chunks.append(self._buffers.get())
                count = min(len(piece) - done, Buffers.CHUNK - start)
                self._chunks[-1][start : start + count] = piece[done : done + count]
                done += count
                self.size += count

    def pieces(self) -> Iterator[memoryview]:
        left = self.size
        while self._chunks:
            chunk = self._chunks.pop(0)
            view = memoryview(chunk)
            inside = min(left, len(view))
            left -= inside
            try:
                for start in range(0, inside, 4 * MIB):
                    piece = view[start : min(start + 4 * MIB, inside)]
                    yield piece
                    piece.release()
            finally:
                view.release()
                self._buffers.give_back(chunk)

    def close(self) -> None:
        for chunk in self._chunks:
            self._buffers.give_back(chunk)
        self._chunks.clear()


class Spilled:
    """A copy in an unlinked file of mode 0600."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
        self.size = 0

    def take(self, fd: int) -> None:
        try:
            while got := os.splice(fd, self._file.fileno(), 16 * MIB):
                self.size += got
        finally:
            os.close(fd)

    def pieces(self) -> Iterator[memoryview]:
        self._file.seek(0)
        buffer = memoryview(bytearray(4 * MIB))
        while got := self._file.readinto(buffer):
            yield buffer[:got]
        self.close()

    def close(self) -> None:
        self._file.close()
