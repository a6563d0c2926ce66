"""Bytes that someone else wrote are parsed with bounds: they give what they say, or errors.Corrupt, nothing else."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stasis.errors import Corrupt
from stasis.store import media
from stasis.store.frame import MAX_FRAME, STRIDES, Decoder, Encoder
from stasis.store.index import HOLE, Index
from stasis.store.layout import LayoutRepository
from stasis.store.reader import RankReader
from stasis.store.writer import RankWriter

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
FIELDS = ["schemaVersion", "mediaType", "artifactType", "config", "layers", "manifests", "annotations"]


@given(st.binary(max_size=300), st.sampled_from(STRIDES), st.integers(1, MAX_FRAME))
@settings(max_examples=200, deadline=None)
def test_any_stored_bytes_are_a_frame_or_corrupt(stored: bytes, stride: int, size: int) -> None:
    try:
        Decoder().decode(memoryview(stored), stride, np.empty(size, np.uint8), "pack x")
    except Corrupt:
        return


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_frame_decodes_or_is_corrupt(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    raw = (rng.standard_normal(20_000) * 0.1).astype(np.float32).view(np.uint8)
    parts, stride = Encoder().encode(raw)
    stored = bytearray(b"".join(bytes(part) for part in parts))
    for _ in range(data.draw(st.integers(0, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    into = np.empty(raw.size, np.uint8)
    try:
        Decoder().decode(memoryview(bytes(stored)), stride, into, "pack x")
    except Corrupt:
        return


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    stored = len(bomb).to_bytes(4, "little") + bomb
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            Decoder().decode(memoryview(stored), 1, np.empty(MAX_FRAME, np.uint8), "pack x")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    repo = LayoutRepository(tmp_path_factory.mktemp("foreign"))
    writer = RankWriter(repo, uid="uid", rank=0)
    rng = np.random.default_rng(0)
    for number in range(4):
        writer.put(f"s{number}", rng.bytes(20_000) + bytes(9000) + rng.bytes(5000 * number))
    return RankReader(repo, writer.finish({}).manifest).index.encode()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_forged_index_is_sound_or_corrupt(blob: bytes, data: st.DataObject) -> None:
    body = bytearray(blob[:-16])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0xFF]) | st.integers(0, 255))
    try:
        index = Index.decode(bytes(body) + xxhash.xxh3_128_digest(bytes(body)), "index x")
    except Corrupt:
        return
    for number in range(len(index.names)):
        for first, count in index.extents_of(number).tolist():
            if first != HOLE:
                assert len(index.chunks_at(slice(first, first + count))) == count


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.just(media.MANIFEST) | st.just(2), max_size=7))
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_manifest_or_corrupt(raw: dict[str, object]) -> None:
    for more in (
        {},
        {"schemaVersion": 2, "mediaType": media.MANIFEST},
        {"schemaVersion": 2, "mediaType": media.IMAGE_INDEX},
    ):
        try:
            media.parse_manifest(json.dumps(raw | more).encode(), "manifest x")
        except Corrupt:
            continue


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"{}", b'{"schemaVersion":2}']
)
def test_what_is_no_manifest_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt):
        media.parse_manifest(body, "manifest x")


def test_an_index_json_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"manifests": [{"digest": "../../etc/passwd"}]}')
    with pytest.raises(Corrupt, match=r"index\.json"):
        LayoutRepository(tmp_path).tags()
