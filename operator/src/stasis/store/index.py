"""The index blob: which chunks make up a rank's streams and where they lie (docs/format.md, Index).

Tables are numpy structured arrays, so that a million chunks are read and checked without a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stasis.errors import Corrupt
from stasis.store.chunker import PAGE
from stasis.store.frame import MAX_FRAME, MAX_STORED, STRIDES

MAGIC = b"STASISIX"
VERSION = 1
HOLE = 0xFFFFFFFF  # an extent's chunk number: `count` zero pages instead
MAX_INDEX = 1 << 30
MAX_NAME = 4096
MAX_PACK = 512 << 20

_HEADER = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("rank", "<u4"), ("uid", "S64")]
    + [(name, "<u4") for name in ("packs", "frames", "chunks", "streams", "extents", "names")]
    + [("reserved", "V24")]
)
PACKS = np.dtype([("digest", "V32"), ("size", "<u8")])
FRAMES = np.dtype(
    [("pack", "<u4"), ("stride", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("checksum", "<u8")]
)
CHUNKS = np.dtype([("digest", "V16"), ("frame", "<u4"), ("offset", "<u4"), ("length", "<u4")])
STREAMS = np.dtype([("size", "<u8"), ("name", "<u4"), ("extents", "<u4")])
EXTENTS = np.dtype([("chunk", "<u4"), ("count", "<u4")])

Table = NDArray[Any]
Chunk = tuple[bytes, int, int, int]  # a row of CHUNKS: digest, frame, offset, length


@dataclass(frozen=True)
class Index:
    """The tables of one rank. `names[i]` belongs to `streams[i]`; a stream's extents follow those of the one before."""

    uid: str
    rank: int
    packs: Table
    frames: Table
    chunks: Table
    streams: Table
    extents: Table
    names: tuple[str, ...]

    def encode(self) -> bytes:
        names = [name.encode() for name in self.names]
        header = np.zeros((), _HEADER)
        header["magic"], header["version"], header["rank"] = MAGIC, VERSION, self.rank
        header["uid"] = self.uid.encode()
        tables = {"packs": self.packs, "frames": self.frames, "chunks": self.chunks}
        tables |= {"streams": self.streams, "extents": self.extents}
        for name, table in tables.items():
            header[name] = len(table)
        header["names"] = sum(map(len, names))
        body = b"".join([header.tobytes(), *(table.tobytes() for table in tables.values()), *names])
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def decode(cls, blob: bytes, where: str) -> Index:
        """Raises errors.Corrupt naming `where` unless every number in it is in bounds and consistent."""
        head = _HEADER.itemsize
        if not head + 16 <= len(blob) <= MAX_INDEX:
            raise Corrupt(f"{where}: {len(blob)} bytes are no index")
        if xxhash.xxh3_128_digest(memoryview(blob)[:-16]) != blob[-16:]:
            raise Corrupt(f"{where}: the index's checksum is wrong")
        header = np.frombuffer(blob, _HEADER, 1)[0]
        if bytes(header["magic"]) != MAGIC or header["version"] != VERSION:
            raise Corrupt(f"{where}: no index of version {VERSION}")
        at, tables = head, {}
        kinds = {"packs": PACKS, "frames": FRAMES, "chunks": CHUNKS, "streams": STREAMS, "extents": EXTENTS}
        if (
            head + sum(kind.itemsize * int(header[name]) for name, kind in kinds.items()) + int(header["names"])
            != len(blob) - 16
        ):
            raise Corrupt(f"{where}: the index's tables do not fill it")
        for name, kind in kinds.items():
            tables[name] = np.frombuffer(blob, kind, int(header[name]), at)
            at += tables[name].nbytes
        try:
            uid, text = bytes(header["uid"]).decode(), blob[at:-16]
            names, at = [], 0
            for length in tables["streams"]["name"].tolist():
                names.append(text[at : at + length].decode())
                at += length
        except UnicodeDecodeError:
            raise Corrupt(f"{where}: a name is no UTF-8") from None
        index = cls(uid=uid, rank=int(header["rank"]), names=tuple(names), **tables)
        index._check(where, at == len(text))
        return index

    def _check(self, where: str, names_fill: bool) -> None:
        frames, chunks, extents, streams = self.frames, self.chunks, self.extents, self.streams
        lengths = streams["name"]
        if (
            not names_fill
            or len(set(self.names)) != len(self.names)
            or (lengths < 1).any()
            or (lengths > MAX_NAME).any()
        ):
            raise Corrupt(f"{where}: the names of the streams are not sound")
        if (self.packs["size"] > MAX_PACK).any() or (frames["pack"] >= len(self.packs)).any():
            raise Corrupt(f"{where}: a pack is not sound")
        if (
            not np.isin(frames["stride"], STRIDES).all()
            or (frames["raw"] < 1).any()
            or (frames["raw"] > MAX_FRAME).any()
            or (frames["stored"] > MAX_STORED).any()
            or (frames["offset"] > MAX_PACK).any()
            or (frames["offset"] + frames["stored"] > self.packs["size"][frames["pack"]]).any()
        ):
            raise Corrupt(f"{where}: a frame is not sound")
        if (
            (chunks["frame"] >= len(frames)).any()
            or (chunks["length"] < 1).any()
            or (chunks["length"] > MAX_FRAME).any()
            or (chunks["offset"] > MAX_FRAME).any()
            or (chunks["offset"] + chunks["length"] > frames["raw"][chunks["frame"]]).any()
        ):
            raise Corrupt(f"{where}: a chunk is not sound")
        hole = extents["chunk"] == HOLE
        first, count = extents["chunk"].astype(np.int64), extents["count"].astype(np.int64)
        if (count < 1).any() or (first + count > len(chunks))[~hole].any():
            raise Corrupt(f"{where}: an extent is not sound")
        if int(streams["extents"].astype(np.int64).sum()) != len(extents):
            raise Corrupt(f"{where}: the extents are not those of the streams")
        sizes = self._extent_sizes.tolist()
        for number, (name, size) in enumerate(zip(self.names, streams["size"].tolist(), strict=True)):
            low, high = self._extent_range(number)
            total = sum(sizes[low:high])
            padding = PAGE - 1 if high > low and hole[high - 1] else 0
            if not total - padding <= size <= total:
                raise Corrupt(f"{where}: the extents of {name} make {total} bytes, not {size}")

    @cached_property
    def _extent_sizes(self) -> NDArray[np.int64]:
        """Bytes that each extent covers; a stream's last hole may be cut short by the stream's size."""
        ends = np.concatenate([[0], np.cumsum(self.chunks["length"], dtype=np.int64)])
        hole = self.extents["chunk"] == HOLE
        first, count = self.extents["chunk"].astype(np.int64), self.extents["count"].astype(np.int64)
        first[hole] = 0
        return np.where(hole, count * PAGE, ends[np.where(hole, 0, first + count)] - ends[first])

    @cached_property
    def _first_extents(self) -> list[int]:
        return [0, *np.cumsum(self.streams["extents"], dtype=np.int64).tolist()]

    def _extent_range(self, number: int) -> tuple[int, int]:
        return self._first_extents[number], self._first_extents[number + 1]

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def extents_of(self, number: int) -> Table:
        low, high = self._extent_range(number)
        return self.extents[low:high]

    def chunks_at(self, numbers: slice | NDArray[np.integer[Any]]) -> list[Chunk]:
        rows: list[Chunk] = self.chunks[numbers].tolist()
        return rows

    def pack_digest(self, number: int) -> str:
        return f"sha256:{bytes(self.packs['digest'][number]).hex()}"


def build(uid: str, rank: int, streams: Sequence[tuple[str, int, Sequence[tuple[int, int]]]], **tables: Table) -> Index:
    """An index of streams given as (name, size, extents)."""
    rows = np.array([(size, len(name.encode()), len(extents)) for name, size, extents in streams], STREAMS)
    extents = np.array([extent for _, _, parts in streams for extent in parts], EXTENTS)
    names = tuple(name for name, _, _ in streams)
    return Index(uid=uid, rank=rank, streams=rows, extents=extents, names=names, **tables)
