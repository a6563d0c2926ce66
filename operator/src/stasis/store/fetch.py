"""Fetches frames: neighbouring ones in one range, ranges in parallel, checked and decoded in the threads that fetch."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from stasis.errors import Corrupt, NotFound
from stasis.store.frame import MAX_FRAME, Decoder, checksum
from stasis.store.index import Chunk, Index
from stasis.store.pool import Bytes, Pool
from stasis.store.repository import Repository

RANGE = 8 << 20  # stored bytes asked for at once
GAP = 512 << 10  # bytes nobody asked for that are cheaper to read than another request
CACHE = 64 << 20  # bytes of frames kept for later runs

Frames = dict[int, Bytes]


class Frame:
    """A frame that was asked for; its bytes stay valid until it is released."""

    def __init__(self, number: int, coming: Future[Frames]) -> None:
        self.number = number
        self.users = 0
        self._coming = coming

    def bytes(self) -> Bytes:
        """Waits; raises what went wrong."""
        return self._coming.result()[self.number]

    @property
    def failed(self) -> bool:
        return self._coming.done() and self._coming.exception() is not None


class Fetcher:
    """A reader's frames, for all streams that it reads; those used last are kept. For any number of threads."""

    def __init__(self, repo: Repository, index: Index) -> None:
        self._repo, self._index = repo, index
        self._decoder = FrameDecoder(index)
        threads = max(4, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="stasis-fetch")
        self._ranges = Pool(RANGE, threads)
        self._buffers = Pool(MAX_FRAME, 1 << 30)  # bounded by what is kept
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Frame] = OrderedDict()

    def get(self, wanted: Iterable[int]) -> dict[int, Frame]:
        """Starts to fetch those of the frames that are not at hand."""
        out: dict[int, Frame] = {}
        missing = []
        with self._lock:
            for number in wanted:
                kept = self._kept.get(number)
                if kept is None or kept.failed:
                    missing.append(number)
                    continue
                self._kept.move_to_end(number)
                kept.users += 1
                out[number] = kept
            for group in ranges(self._index, missing):
                coming = self._threads.submit(self._fetch, group)
                for number in group:
                    out[number] = self._kept[number] = Frame(number, coming)
                    out[number].users = 1
        return out

    def release(self, frames: Iterable[Frame]) -> None:
        """What nobody uses is forgotten, the longest unused first, when the cache is full."""
        with self._lock:
            for frame in frames:
                frame.users -= 1
            excess = len(self._kept) - CACHE // MAX_FRAME
            if excess > 0:
                for number in [number for number, frame in self._kept.items() if not frame.users][:excess]:
                    frame = self._kept.pop(number)
                    if not frame.failed:
                        self._buffers.give(frame.bytes())

    def _fetch(self, numbers: Sequence[int]) -> Frames:
        frames = self._index.frames
        pack, start = int(frames["pack"][numbers[0]]), int(frames["offset"][numbers[0]])
        end = max(int(frames["offset"][n]) + int(frames["stored"][n]) for n in numbers)
        buffer = self._ranges.take()
        try:
            data = buffer[: end - start].data
            read_pack(self._repo, self._index.pack_digest(pack), start, data)
            out = {}
            for number in numbers:
                out[number] = self._buffers.take()
                self._decoder.decode(number, data, start, out[number])
            return out
        finally:
            self._ranges.give(buffer)


class FrameDecoder:
    """Checks and decodes frames; for any number of threads."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._local = threading.local()

    def decode(self, number: int, data: memoryview, start: int, into: Bytes) -> None:
        """A frame, out of its pack's bytes from `start` on, to the front of `into`."""
        if not hasattr(self._local, "decoder"):
            self._local.decoder = Decoder()
        decoder: Decoder = self._local.decoder
        stored = self.checked(number, data, start)
        frame = self._index.frames[number]
        decoder.decode(stored, int(frame["stride"]), into[: int(frame["raw"])], self._where(number))

    def checked(self, number: int, data: memoryview, start: int) -> memoryview:
        """A frame's stored bytes, out of its pack's from `start` on, with their checksum compared."""
        _, _, offset, stored, _, check = self._index.frames[number].tolist()
        view = data[offset - start : offset - start + stored]
        if checksum([view]) != check:
            raise Corrupt(f"{self._where(number)}: its {stored} bytes have another checksum")
        return view

    def _where(self, number: int) -> str:
        frame = self._index.frames[number]
        return f"pack {self._index.pack_digest(int(frame['pack']))}, frame at byte {frame['offset']}"


def read_pack(repo: Repository, digest: str, start: int, into: memoryview) -> None:
    try:
        repo.read_into(digest, start, into)
    except NotFound:
        raise Corrupt(f"pack {digest} is missing in {repo.reference}") from None


def check_chunk(index: Index, chunk: Chunk, raw: Bytes) -> None:
    """Corrupt unless the chunk's bytes are in its frame's raw bytes where the index says."""
    digest, frame, offset, length = chunk
    if xxhash.xxh3_128_digest(raw.data[offset : offset + length]) != digest:
        place = index.frames[frame]
        where = f"pack {index.pack_digest(int(place['pack']))}, frame at byte {place['offset']}"
        raise Corrupt(f"{where}: {length} bytes from {offset} on are not chunk {digest.hex()}")


def ranges(index: Index, numbers: Iterable[int]) -> list[list[int]]:
    """Frames to be read together, each group in the order of a pack and no longer than RANGE."""
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
