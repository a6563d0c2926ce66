"""docs/format.md says all that a reader needs: `Stranger` is written from it alone and shares no code with Stasis."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from stasis.errors import Corrupt
from stasis.store.checkpoint import open_checkpoint, publish, verify
from stasis.store.index import CHUNKS, FRAMES, HOLE, PACKS, Index, build
from stasis.store.layout import LayoutRepository
from stasis.store.writer import RankWriter

SAMPLE = Path(__file__).parent / "samples" / "v1"
EXPECTED: dict[str, list[Any]] = json.loads((SAMPLE / "expected.json").read_text())


class Stranger:
    """Reads all streams of a rank from an OCI image-layout folder."""

    def __init__(self, folder: Path, tag: str, rank: int) -> None:
        self.folder = folder
        listed = json.loads((folder / "index.json").read_text())["manifests"]
        top = next(m for m in listed if m.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag)
        image = json.loads(self.blob(top["digest"]))
        assert image["artifactType"] == "application/vnd.stasis.checkpoint.v1"
        uid = image["annotations"]["dev.stasis.checkpoint.uid"]
        child = next(m for m in image["manifests"] if m["annotations"]["dev.stasis.checkpoint.rank"] == str(rank))
        manifest = json.loads(self.blob(child["digest"]))
        config = json.loads(self.blob(manifest["config"]["digest"]))
        assert (config["version"], config["uid"], config["rank"]) == (1, uid, rank)
        self.config = config["config"]
        self.parse(self.blob(manifest["layers"][0]["digest"]), uid, rank)
        assert set(self.packs) <= {(layer["digest"], layer["size"]) for layer in manifest["layers"][1:]}

    def blob(self, digest: str) -> bytes:
        data = (self.folder / "blobs" / digest.replace(":", "/")).read_bytes()
        assert "sha256:" + hashlib.sha256(data).hexdigest() == digest
        return data

    def parse(self, blob: bytes, uid: str, rank: int) -> None:
        assert xxhash.xxh3_128(blob[:-16]).digest() == blob[-16:]
        magic, version, own_rank, own_uid, *counts = struct.unpack_from("<8sII64s6I", blob)
        assert (magic, version, own_rank, own_uid.rstrip(b"\0").decode()) == (b"STASISIX", 1, rank, uid)
        at, tables = 128, []
        for count, row in zip(counts, ("<32sQ", "<IIQIIQ", "<16sIII", "<QII", "<II"), strict=False):
            tables.append([struct.unpack_from(row, blob, at + n * struct.calcsize(row)) for n in range(count)])
            at += count * struct.calcsize(row)
        packs, self.frames, self.chunks, streams, self.extents = tables
        self.packs = [("sha256:" + digest.hex(), size) for digest, size in packs]
        assert at + counts[5] == len(blob) - 16
        self.streams: dict[str, tuple[int, list[Any]]] = {}
        first = 0
        for size, name_length, extents in streams:
            name = blob[at : at + name_length].decode()
            self.streams[name] = size, self.extents[first : first + extents]
            at, first = at + name_length, first + extents

    def frame(self, number: int) -> bytes:
        pack, stride, offset, stored_size, raw_size, check = self.frames[number]
        stored = self.blob(self.packs[pack][0])[offset : offset + stored_size]
        assert xxhash.xxh3_64(stored).intdigest() == check
        sizes, m, at = struct.unpack_from(f"<{stride}I", stored), raw_size // stride, 4 * stride
        raw = bytearray(raw_size)
        for k, size in enumerate(sizes):
            plane, wanted = stored[at : at + size], m if k < stride - 1 else raw_size - m * (stride - 1)
            if size != wanted:
                plane = zstandard.ZstdDecompressor().decompress(plane)
            assert len(plane) == wanted
            raw[k : m * stride : stride] = plane[:m]
            raw[m * stride :] = plane[m:] if k == stride - 1 else raw[m * stride :]
            at += size
        return bytes(raw)

    def read(self, name: str) -> bytes:
        size, extents = self.streams[name]
        out = b""
        for first, count in extents:
            if first == 0xFFFFFFFF:
                out += bytes(4096 * count)
                continue
            for digest, frame, offset, length in self.chunks[first : first + count]:
                chunk = self.frame(frame)[offset : offset + length]
                assert xxhash.xxh3_128(chunk).digest() == digest
                out += chunk
        return out[:size]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stranger_reads_the_sample(step: int, rank: int) -> None:
    stranger = Stranger(SAMPLE, f"step-{step}", rank)
    got = {f"{step}/{rank}/{name}": stranger.read(name) for name in stranger.streams}
    wanted = {name: found for name, found in EXPECTED.items() if name.startswith(f"{step}/{rank}/")}
    assert {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in got.items()} == wanted
    assert stranger.config == {"step": step, "rank": rank}
    if rank == 0 and step == 1:
        assert {row[1] for row in stranger.frames} >= {2, 4}  # byte planes are in the sample


@pytest.mark.parametrize("step", [1, 2])
def test_this_version_reads_the_sample(step: int) -> None:
    with open_checkpoint(f"{SAMPLE}:step-{step}") as checkpoint:
        assert (checkpoint.uid, checkpoint.config) == (f"sample-{step}", {"step": step})
        for rank in checkpoint.ranks:
            for name in rank.names():
                size, digest = EXPECTED[f"{step}/{rank.rank}/{name}"]
                assert rank.size(name) == size
                assert hashlib.sha256(rank.read(name, size)).hexdigest() == digest
    assert verify(f"{SAMPLE}:step-{step}") > 100_000


def test_a_stranger_reads_what_is_written_today(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fp32 = (rng.standard_normal(300_001) * 0.02).astype(np.float32).tobytes()
    streams = {"pages-1.img": bytes(9000) + fp32[:-3] + bytes(50_000), "ä name": b"x", "fp32": fp32[:1_000_001]}
    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="today", rank=7)
    for name, data in streams.items():
        writer.put(name, data)
    publish(repo, "now", "today", [writer.finish({"a": [1]}).manifest], {})
    stranger = Stranger(tmp_path, "now", 7)
    assert {name: stranger.read(name) for name in stranger.streams} == streams


def sound_index() -> Index:
    chunks = np.array([(b"1" * 16, 0, 0, 4096), (b"2" * 16, 0, 4096, 100)], CHUNKS)
    return build(
        "uid",
        0,
        [("a", 4096 + 100, [(0, 2)]), ("b", 4096 * 2 + 5, [(HOLE, 2), (HOLE, 1)])],
        packs=np.array([(b"p" * 32, 1000)], PACKS),
        frames=np.array([(0, 1, 100, 900, 4196, 1)], FRAMES),
        chunks=chunks,
    )


BROKEN = {
    "a pack that is not there": ("frames", "pack", 1),
    "a stride of 3": ("frames", "stride", 3),
    "a frame beyond its pack": ("frames", "offset", 101),
    "an offset that wraps": ("frames", "offset", 2**64 - 10),
    "an empty frame": ("frames", "raw", 0),
    "a frame of 4 GiB": ("frames", "raw", 2**32 - 1),
    "a frame stored larger than any": ("frames", "stored", 2**32 - 1),
    "a chunk in no frame": ("chunks", "frame", 1),
    "a chunk beyond its frame": ("chunks", "offset", 4096),
    "a chunk whose end wraps": ("chunks", "offset", 2**32 - 1),
    "an empty chunk": ("chunks", "length", 0),
    "a huge pack": ("packs", "size", 2**63),
    "a stream larger than its extents": ("streams", "size", 10_000_000),
    "a stream smaller than its extents": ("streams", "size", 1),
    "a name longer than all": ("streams", "name", 3),
    "a stream without a name": ("streams", "name", 0),
    "extents of nobody": ("streams", "extents", 0),
    "more extents than there are": ("streams", "extents", 2**31),
    "an extent of chunks that are not there": ("extents", "count", 4),
    "an empty extent": ("extents", "count", 0),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_forged_index_is_refused(what: str) -> None:
    index = sound_index()
    assert Index.decode(index.encode(), "index x").names == ("a", "b")
    table, field, value = BROKEN[what]
    getattr(index, table)[field][0] = value
    with pytest.raises(Corrupt, match="index x"):
        Index.decode(index.encode(), "index x")


@pytest.mark.parametrize("field", range(6))
def test_counts_that_promise_more_than_there_is_allocate_nothing(field: int) -> None:
    body = bytearray(sound_index().encode()[:-16])
    struct.pack_into("<I", body, 80 + 4 * field, 2**32 - 1)
    with pytest.raises(Corrupt):
        Index.decode(bytes(body) + xxhash.xxh3_128_digest(bytes(body)), "index")


def test_names_must_differ_and_be_utf8() -> None:
    for names in (b"aa", b"\xff\xfe"):
        body = bytearray(sound_index().encode()[:-16])
        body[-2:] = names
        with pytest.raises(Corrupt):
            Index.decode(bytes(body) + xxhash.xxh3_128_digest(bytes(body)), "index")


def test_a_million_chunks_are_checked_without_a_loop() -> None:
    rows = np.zeros(1_000_000, CHUNKS)
    rows["length"] = 1
    index = sound_index()
    big = build("uid", 0, [("a", 1_000_000, [(0, 1_000_000)])], packs=index.packs, frames=index.frames, chunks=rows)
    assert abs(calls_to_decode(big.encode()) - calls_to_decode(index.encode())) < 100


def calls_to_decode(blob: bytes) -> int:
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        Index.decode(blob, "index")
    finally:
        sys.setprofile(None)
    return calls
