"""Reads all that an index needs of its packs and checks it, before anything is built on a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from stasis.errors import Corrupt
from stasis.store.fetch import RANGE, FrameDecoder, ranges, read_pack
from stasis.store.index import Index
from stasis.store.pool import Pool
from stasis.store.repository import Repository

Keep = Callable[[str, int, memoryview], None]  # a pack's digest, where in it, the bytes


def prefetch(repo: Repository, index: Index, keep: Keep | None = None) -> None:
    """Compares each frame's checksum, which tells damage; whoever decodes it later compares its chunks, too. Raises
    errors.Corrupt naming the pack and the byte, and what `keep` raises."""
    threads = max(4, len(os.sched_getaffinity(0)))
    buffers, decoder = Pool(RANGE, threads), FrameDecoder(index)
    frames = index.frames

    def fetch(numbers: list[int]) -> None:
        digest, start = index.pack_digest(int(frames["pack"][numbers[0]])), int(frames["offset"][numbers[0]])
        end = max(int(frames["offset"][n]) + int(frames["stored"][n]) for n in numbers)
        buffer = buffers.take()
        try:
            data = buffer[: end - start].data
            read_pack(repo, digest, start, data)
            for number in numbers:
                decoder.checked(number, data, start)
            if keep:
                keep(digest, start, data)
        finally:
            buffers.give(buffer)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="stasis-prefetch")
    try:
        for done in [pool.submit(fetch, numbers) for numbers in ranges(index, range(len(frames)))]:
            done.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Spool:
    """Packs in a file, one after the other; what was not kept of them is zeros. For any number of threads."""

    def __init__(self, fd: int, index: Index) -> None:
        """Keeps a descriptor of its own."""
        self._fd = os.dup(fd)
        self._starts: dict[str, int] = {}
        start = 0
        for number, size in enumerate(index.packs["size"].tolist()):
            self._starts[index.pack_digest(number)] = start
            start += size

    def __contains__(self, digest: str) -> bool:
        return digest in self._starts

    def keep(self, digest: str, offset: int, data: memoryview) -> None:
        at = self._starts[digest] + offset
        while data:
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        at = self._starts[digest] + offset
        while into:
            count = os.preadv(self._fd, [into], at)
            if not count:
                raise Corrupt(f"pack {digest} was kept up to byte {at - self._starts[digest]} only")
            into, at = into[count:], at + count
