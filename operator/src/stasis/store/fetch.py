"""Fetches frames: neighbouring ones in one range, ranges in parallel, checked and decoded in the threads that fetch."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from stasis.errors import Corrupt, NotFound
from stasis.store.frame import Bytes, Decoder, checksum
from stasis.store.index import Index
from stasis.store.repository import Repository

RANGE = 8 << 20  # stored bytes asked for at once
GAP = 512 << 10  # bytes nobody asked for that are cheaper to read than another request
CACHE = 64 << 20  # raw bytes of frames kept for later runs

Frames = dict[int, Bytes]


class FrameDecoder:
    """Checks and decodes frames; for any number of threads."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._local = threading.local()

    def decode(self, number: int, data: memoryview, start: int) -> Bytes:
        """The frame's raw bytes out of its pack's bytes from `start` on."""
        if not hasattr(self._local, "decoder"):
            self._local.decoder = Decoder()
        decoder: Decoder = self._local.decoder
        pack, stride, offset, stored, raw, check = self._index.frames[number].tolist()
        where = f"pack {self._index.pack_digest(pack)}, frame at byte {offset}"
        view = data[offset - start : offset - start + stored]
        if checksum(view) != check:
            raise Corrupt(f"{where}: its {stored} bytes have another checksum")
        return decoder.decode(view, stride, raw, where)


class Fetcher:
    """One reader's frames. Close it, or use it as a context."""

    def __init__(self, repo: Repository, index: Index, threads: int = 0) -> None:
        self._repo, self._index = repo, index
        self._threads = ThreadPoolExecutor(
            threads or max(4, len(os.sched_getaffinity(0))), thread_name_prefix="stasis-fetch"
        )
        self._decoder = FrameDecoder(index)
        self._cache: OrderedDict[int, Future[Frames]] = OrderedDict()
        self._cached_bytes = 0

    def get(self, wanted: Iterable[int]) -> dict[int, Future[Frames]]:
        """Starts to fetch frames, all but those at hand; the result of a frame's future holds it under its number."""
        out: dict[int, Future[Frames]] = {}
        missing = []
        for number in wanted:
            if number in self._cache:
                self._cache.move_to_end(number)
                out[number] = self._cache[number]
            else:
                missing.append(number)
        for group in _ranges(self._index, missing):
            future = self._threads.submit(self._fetch, group)
            for number in group:
                out[number] = self._cache[number] = future
                self._cached_bytes += int(self._index.frames["raw"][number])
        return out

    def trim(self) -> None:
        """Forgets what was used longest ago."""
        while self._cached_bytes > CACHE:
            number, _ = self._cache.popitem(last=False)
            self._cached_bytes -= int(self._index.frames["raw"][number])

    def _fetch(self, numbers: Sequence[int]) -> Frames:
        frames = self._index.frames
        pack, start = int(frames["pack"][numbers[0]]), int(frames["offset"][numbers[0]])
        end = max(int(frames["offset"][n]) + int(frames["stored"][n]) for n in numbers)
        data = memoryview(read_pack(self._repo, self._index, pack, start, end - start))
        return {n: self._decoder.decode(n, data, start) for n in numbers}

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def read_pack(repo: Repository, index: Index, pack: int, start: int, length: int) -> bytes:
    digest = index.pack_digest(pack)
    try:
        return repo.read(digest, start, length)
    except NotFound:
        raise Corrupt(f"pack {digest} is missing in {repo.reference}") from None


def check_chunk(index: Index, number: int, raw: Bytes) -> None:
    """Corrupt unless the chunk's bytes are in its frame's raw bytes where the index says."""
    row = index.chunks[number]
    offset, length, frame = int(row["offset"]), int(row["length"]), index.frames[int(row["frame"])]
    if xxhash.xxh3_128_digest(raw.data[offset : offset + length]) != bytes(row["digest"]):
        where = f"pack {index.pack_digest(int(frame['pack']))}, frame at byte {frame['offset']}"
        raise Corrupt(f"{where}: {length} bytes from {offset} on are not chunk {bytes(row['digest']).hex()}")


def _ranges(index: Index, numbers: list[int]) -> list[list[int]]:
    """Frames to be read together, each group in the order of a pack."""
    frames = index.frames
    rows = sorted((int(frames["pack"][n]), int(frames["offset"][n]), int(frames["stored"][n]), n) for n in numbers)
    groups: list[list[int]] = []
    last_pack, first, end = -1, 0, 0
    for pack, offset, stored, number in rows:
        if pack != last_pack or offset > end + GAP or offset + stored > first + RANGE:
            groups.append([])
            last_pack, first = pack, offset
        groups[-1].append(number)
        end = offset + stored
    return groups
