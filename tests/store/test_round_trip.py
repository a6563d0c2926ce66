"""What is put into a rank's checkpoint comes out of it, byte for byte, whatever the bytes and the pieces."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stasis.errors import NotFound, UsageError
from stasis.store.checkpoint import list_checkpoints, open_checkpoint, publish, remove, verify
from stasis.store.connect import open_repository
from stasis.store.layout import LayoutRepository
from stasis.store.reader import RankReader
from stasis.store.repository import Repository
from stasis.store.writer import RankResult, RankWriter, StoreOptions

PAGE = 4096


def store(
    repo: Repository, streams: dict[str, bytes], *, uid: str = "uid-1", rank: int = 0, **more: object
) -> RankResult:
    writer = RankWriter(repo, uid=uid, rank=rank)
    for name, data in streams.items():
        writer.put(name, data)
    return writer.finish({"rank": rank})


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Stretches of zeros, noise, floats and text, of lengths around page, chunk and segment borders."""
    out = []
    for _ in range(draw(st.integers(0, 5))):
        pages = draw(st.sampled_from([0, 1, 3, 16, 63, 64, 65, 300, 1023, 1024, 1100]))
        size = max(0, pages * PAGE + draw(st.sampled_from([-1, 0, 0, 0, 1, 17])))
        rng = np.random.default_rng(draw(st.integers(0, 3)))
        kind = draw(st.sampled_from(["zero", "noise", "fp32", "bf16", "text"]))
        if kind == "zero":
            out.append(bytes(size))
        elif kind == "noise":
            out.append(rng.bytes(size))
        elif kind == "text":
            out.append((b"a line of a log, as it may be\n" * (size // 20 + 1))[:size])
        else:
            values = rng.standard_normal(size // 2 + 4).astype(np.float32)
            words = values.view(np.uint32) >> 16
            out.append((values.tobytes() if kind == "fp32" else words.astype(np.uint16).tobytes())[:size])
    return b"".join(out)


@given(data=contents(), step=st.sampled_from([1 << 30, 100_001, 65536, 4095]), compress=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_come_back(tmp_path: Path, data: bytes, step: int, compress: bool) -> None:
    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=3, options=StoreOptions(workers=2, compress=compress))
    writer.add("pages-1.img", (memoryview(data)[at : at + step] for at in range(0, len(data), step)))
    result = writer.finish({})
    reader = RankReader(repo, result.manifest)
    assert reader.size("pages-1.img") == len(data)
    assert reader.read("pages-1.img", len(data)) == data
    assert result.stats.raw == len(data)
    reader.verify()


def test_pieces_may_be_reused_as_soon_as_the_next_is_asked_for(tmp_path: Path) -> None:
    ring, whole = bytearray(1 << 20), os.urandom(12 << 20)

    def pieces() -> object:
        for at in range(0, len(whole), len(ring)):
            ring[:] = whole[at : at + len(ring)]
            yield memoryview(ring)

    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=0)
    writer.add("ring", pieces())  # type: ignore[arg-type]
    reader = RankReader(repo, writer.finish({}).manifest)
    assert reader.read("ring", 1 << 30) == whole


def test_copy_to_writes_a_stream_into_a_pipe_in_order(tmp_path: Path) -> None:
    data = os.urandom(9 << 20) + bytes(5 << 20) + os.urandom(3 << 20) + b"end"
    repo = LayoutRepository(tmp_path)
    reader = RankReader(repo, store(repo, {"pages": data}).manifest)
    read_end, write_end = os.pipe()
    got: list[bytes] = []

    def drain() -> None:
        with open(read_end, "rb") as pipe:
            got.append(pipe.read())

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        reader.copy_to("pages", write_end)
    finally:
        os.close(write_end)
        thread.join()
    assert got == [data]


def test_streams_may_be_added_by_several_threads(tmp_path: Path) -> None:
    streams = {f"s{n}": os.urandom(n * 700_000 + n) for n in range(8)}
    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=0)
    threads = [threading.Thread(target=writer.put, args=item) for item in streams.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = RankReader(repo, writer.finish({}).manifest)
    assert sorted(reader.names()) == sorted(streams)
    assert {name: reader.read(name, 1 << 30) for name in streams} == streams


def test_a_published_checkpoint_is_found_by_tag_and_digest_and_removed(tmp_path: Path) -> None:
    repo = LayoutRepository(tmp_path / "store")
    ranks = [store(repo, {"log": b"rank %d" % n}, rank=n).manifest for n in (1, 0)]
    assert list_checkpoints(f"oci:{tmp_path}/store") == []
    digest = publish(repo, "step-5", "uid-1", ranks, {"job": "gpt"}).digest
    assert publish(repo, "step-5", "uid-1", ranks, {"job": "gpt"}).digest == digest  # repeatable
    for where in (f"{tmp_path}/store:step-5", f"{tmp_path}/store@{digest}"):
        with open_checkpoint(where) as checkpoint:
            assert (checkpoint.uid, checkpoint.digest, checkpoint.config) == ("uid-1", digest, {"job": "gpt"})
            assert [rank.config for rank in checkpoint.ranks] == [{"rank": 0}, {"rank": 1}]
            assert checkpoint.ranks[1].read("log", 100) == b"rank 1"
            assert checkpoint.stored == sum(blob.size for rank in checkpoint.ranks for blob in rank.blobs)
    verify(f"{tmp_path}/store:step-5")
    assert [(found.tag, found.ranks) for found in list_checkpoints(f"{tmp_path}/store")] == [("step-5", 2)]
    assert remove(f"{tmp_path}/store:step-5") > 0
    with pytest.raises(NotFound):
        open_checkpoint(f"{tmp_path}/store:step-5")
    assert list((tmp_path / "store" / "blobs" / "sha256").iterdir()) == []


def test_ranks_of_different_checkpoints_are_not_published_together(tmp_path: Path) -> None:
    repo = open_repository(tmp_path)
    ranks = [store(repo, {}, uid="one", rank=0).manifest, store(repo, {}, uid="two", rank=1).manifest]
    with pytest.raises(UsageError):
        publish(repo, "mixed", "one", ranks, {})


def test_a_stream_that_is_larger_than_asked_for_is_not_read(tmp_path: Path) -> None:
    repo = LayoutRepository(tmp_path)
    reader = RankReader(repo, store(repo, {"log": bytes(100)}).manifest)
    with pytest.raises(UsageError):
        reader.read("log", 99)
    with pytest.raises(NotFound):
        reader.read("other", 99)
