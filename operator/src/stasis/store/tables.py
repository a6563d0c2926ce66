"""What a writer knows of its chunks: their numbers, frames and packs, and those of the parent that it uses."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stasis.store.index import CHUNKS, FRAMES, PACKS, Index, build

_NOWHERE = 0xFFFFFFFF  # the frame of a chunk that is not placed yet
WORTH = 0.5  # of a pack's bytes have to be in use for it to be kept by another checkpoint


class Parent:
    """The chunks of an earlier checkpoint that may be referred to: those in packs found to be there.

    And worth it. A pack stays whole as long as anything in it is in use, so what the others have left behind in it is
    stored once more: however long a chain of checkpoints is, its last one keeps 1 / WORTH of what it needs at most.
    """

    def __init__(self, index: Index, usable_packs: Sequence[bool]) -> None:
        self.index = index
        packs = np.array(usable_packs, bool) & (_in_use(index) >= WORTH * index.packs["size"])
        usable = packs[index.frames["pack"]][index.chunks["frame"]]
        digests = index.chunks["digest"].tolist()
        self.chunks = {digests[number]: number for number in np.flatnonzero(usable).tolist()}


def _in_use(index: Index) -> NDArray[np.float64]:
    """Stored bytes of each pack that the checkpoint uses; of a frame by the part of it that its chunks are."""
    frames, chunks = index.frames, index.chunks
    raw = np.bincount(chunks["frame"], chunks["length"], len(frames))
    used = np.bincount(frames["pack"], raw * frames["stored"] / frames["raw"], len(index.packs))
    return used.astype(np.float64)  # weighted sums, which numpy's types take for counts


class Tables:
    """Thread-safe; a chunk has its number before it has its place."""

    def __init__(self, parent: Parent | None = None) -> None:
        self._lock = threading.Lock()
        self._parent = parent
        self._numbers: dict[bytes, int] = {}
        self._digests = bytearray()
        self._frame, self._offset, self._length = array("I"), array("I"), array("I")
        self._frames: list[tuple[int, int, int, int, int, int]] = []
        self._packs: list[tuple[bytes, int]] = []
        self._parent_frames: dict[int, int] = {}
        self._parent_packs: dict[int, int] = {}

    def claim(self, digests: Sequence[bytes], lengths: Sequence[int]) -> tuple[list[int], list[bool]]:
        """The number of each chunk, and whether the caller has to store it."""
        numbers, fresh = [], []
        with self._lock:
            for digest, length in zip(digests, lengths, strict=True):
                number, new = self._numbers.get(digest), False
                if number is None:
                    number = len(self._length)
                    self._numbers[digest] = number
                    self._digests += digest
                    self._length.append(length)
                    frame, offset = self._in_parent(digest)
                    self._frame.append(frame)
                    self._offset.append(offset)
                    new = frame == _NOWHERE
                numbers.append(number)
                fresh.append(new)
        return numbers, fresh

    def _in_parent(self, digest: bytes) -> tuple[int, int]:
        old = self._parent.chunks.get(digest) if self._parent else None
        if self._parent is None or old is None:
            return _NOWHERE, 0
        index = self._parent.index
        old_frame, offset = int(index.chunks["frame"][old]), int(index.chunks["offset"][old])
        if old_frame not in self._parent_frames:
            pack, *rest = index.frames[old_frame].tolist()
            if pack not in self._parent_packs:
                self._parent_packs[pack] = len(self._packs)
                self._packs.append((bytes(index.packs["digest"][pack]), int(index.packs["size"][pack])))
            self._parent_frames[old_frame] = len(self._frames)
            self._frames.append((self._parent_packs[pack], *rest))
        return self._parent_frames[old_frame], offset

    def open_pack(self) -> int:
        with self._lock:
            self._packs.append((bytes(32), 0))
            return len(self._packs) - 1

    def seal_pack(self, number: int, digest: str, size: int) -> None:
        with self._lock:
            self._packs[number] = (bytes.fromhex(digest.removeprefix("sha256:")), size)

    def place(self, frame: tuple[int, int, int, int, int, int], chunks: Sequence[tuple[int, int]]) -> None:
        """Records a frame (a row of index.FRAMES) that holds chunks given as (number, offset)."""
        with self._lock:
            self._frames.append(frame)
            for number, offset in chunks:
                self._frame[number] = len(self._frames) - 1
                self._offset[number] = offset

    @property
    def parent_packs_used(self) -> list[int]:
        """Their numbers in the parent's index."""
        with self._lock:
            return sorted(self._parent_packs)

    @property
    def chunk_count(self) -> int:
        return len(self._length)

    @property
    def pack_count(self) -> int:
        return len(self._packs)

    def index(self, uid: str, rank: int, streams: Sequence[tuple[str, int, Sequence[tuple[int, int]]]]) -> Index:
        chunks = np.empty(len(self._length), CHUNKS)
        chunks["digest"] = np.frombuffer(bytes(self._digests), "V16")
        chunks["frame"], chunks["offset"], chunks["length"] = self._frame, self._offset, self._length
        packs, frames = np.array(self._packs, PACKS), np.array(self._frames, FRAMES)
        return build(uid, rank, streams, packs=packs, frames=frames, chunks=chunks)
