"""The chunks of a segment: hashed, looked up, gathered into frames, compressed and packed. For many threads."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from stasis.store.chunker import PAGE, Cut
from stasis.store.frame import MAX_FRAME, Encoder, checksum, plain
from stasis.store.index import HOLE
from stasis.store.pack import Packer
from stasis.store.pool import Bytes
from stasis.store.tables import Tables

BUNDLE_BELOW = 256 << 10  # new chunks of a segment that are fewer bytes than this share a frame with those of others
Extent = tuple[int, int]
_New = tuple[int, int, int]  # number, start and end of a chunk that has to be stored


@dataclass
class Counted:
    """Bytes."""

    raw: int = 0
    zero: int = 0
    fresh: int = 0


class _Bundle:
    """Raw bytes of a frame in the making, and its chunks as (number, offset)."""

    def __init__(self) -> None:
        self.buffer = np.empty(MAX_FRAME, np.uint8)
        self.size = 0
        self.chunks: list[tuple[int, int]] = []

    def add(self, segment: Bytes, new: Iterable[_New]) -> None:
        for number, start, end in new:
            self.buffer[self.size : self.size + end - start] = segment[start:end]
            self.chunks.append((number, self.size))
            self.size += end - start

    def clear(self) -> None:
        self.size, self.chunks = 0, []


class ChunkStore:
    def __init__(self, tables: Tables, packer: Packer, *, compress: bool) -> None:
        self._tables, self._packer, self._compress = tables, packer, compress
        self._local = threading.local()
        self._lock = threading.Lock()
        self._bundle = _Bundle()
        self.counted = Counted()
        self.seconds: dict[str, float] = defaultdict(float)  # of thread time, by stage

    def store(self, segment: Bytes, cuts: list[Cut]) -> list[Extent]:
        """The extents that stand for the segment; what is new of it is in a pack or in the bundle."""
        started = time.perf_counter()
        view = segment.data
        chunks = [c for c in cuts if not c.hole]
        digests = [xxhash.xxh3_128_digest(view[c.start : c.end]) for c in chunks]
        numbers, fresh = self._tables.claim(digests, [c.end - c.start for c in chunks])
        new = [(n, c.start, c.end) for n, c, is_new in zip(numbers, chunks, fresh, strict=True) if is_new]
        size = sum(end - start for _, start, end in new)
        self._count("hash", started)
        with self._lock:
            self.counted.raw += cuts[-1].end if cuts else 0
            self.counted.zero += sum(c.end - c.start for c in cuts if c.hole)
            self.counted.fresh += size
        if size < BUNDLE_BELOW:
            self._store_together(segment, new, size)
        else:
            self._store_frames(segment, new)
        return _extents(cuts, numbers)

    def flush(self) -> None:
        """Packs what waits for more; when all segments are stored."""
        if self._bundle.size:
            self._store_frame(self._bundle.buffer[: self._bundle.size], self._bundle.chunks)
            self._bundle.clear()

    def _store_together(self, segment: Bytes, new: list[_New], size: int) -> None:
        full = None
        with self._lock:
            if self._bundle.size + size > MAX_FRAME:
                full, self._bundle = self._bundle, _Bundle()
            self._bundle.add(segment, new)
        if full:
            self._store_frame(full.buffer[: full.size], full.chunks)

    def _store_frames(self, segment: Bytes, new: list[_New]) -> None:
        """As many chunks to a frame as it takes."""
        group: list[_New] = []
        size = 0
        for chunk in new:
            length = chunk[2] - chunk[1]
            if size + length > MAX_FRAME:
                self._store_group(segment, group, size)
                group, size = [], 0
            group.append(chunk)
            size += length
        self._store_group(segment, group, size)

    def _store_group(self, segment: Bytes, group: list[_New], size: int) -> None:
        first, last = group[0][1], group[-1][2]
        if last - first == size:  # neighbours: no copy
            self._store_frame(segment[first:last], [(number, start - first) for number, start, _ in group])
            return
        if not hasattr(self._local, "scratch"):
            self._local.scratch = _Bundle()
        scratch: _Bundle = self._local.scratch
        scratch.clear()
        scratch.add(segment, group)
        self._store_frame(scratch.buffer[:size], scratch.chunks)

    def _store_frame(self, raw: Bytes, chunks: list[tuple[int, int]]) -> None:
        started = time.perf_counter()
        parts, stride = self._encoder.encode(raw) if self._compress else (plain(raw), 1)
        self._count("compress", started)
        started = time.perf_counter()
        pack, offset = self._packer.append(parts)
        stored = sum(len(part) for part in parts)
        self._tables.place((pack, stride, offset, stored, raw.size, checksum(parts)), chunks)
        self._count("pack", started)

    @property
    def _encoder(self) -> Encoder:
        """This thread's."""
        if not hasattr(self._local, "encoder"):
            self._local.encoder = Encoder()
        encoder: Encoder = self._local.encoder
        return encoder

    def _count(self, stage: str, since: float) -> None:
        with self._lock:
            self.seconds[stage] += time.perf_counter() - since


def _extents(cuts: list[Cut], numbers: list[int]) -> list[Extent]:
    """Runs of (first chunk number, count), holes as (HOLE, pages)."""
    following = iter(numbers)
    return merged((HOLE, -(-(c.end - c.start) // PAGE)) if c.hole else (next(following), 1) for c in cuts)


def merged(extents: Iterable[Extent]) -> list[Extent]:
    """The same with neighbours joined."""
    out: list[Extent] = []
    for first, count in extents:
        if out and first == (HOLE if out[-1][0] == HOLE else out[-1][0] + out[-1][1]):
            out[-1] = out[-1][0], out[-1][1] + count
        else:
            out.append((first, count))
    return out
