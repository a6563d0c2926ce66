"""What is there already is not stored again: zeros, repetitions, and what the parent has, wherever it moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stasis.errors import Unavailable
from stasis.store.layout import LayoutRepository
from stasis.store.reader import RankReader
from stasis.store.repository import Repository
from stasis.store.writer import RankResult, RankWriter, StoreOptions

MIB, PAGE = 1 << 20, 4096


def store(repo: Repository, data: bytes, parent: RankReader | None = None, uid: str = "uid") -> RankResult:
    writer = RankWriter(repo, uid=uid, rank=0, parent=parent)
    writer.put("pages-1.img", data)
    return writer.finish({})


class Counting(LayoutRepository):
    """Counts what is read, and fails on demand."""

    reads = 0
    broken = False

    def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        self.reads += 1
        if self.broken:
            raise Unavailable("for now")
        super().read_into(digest, offset, into)


def memory(tensors: list[bytes], seed: int, gaps: bool) -> bytes:
    """Tensors in a new order, packed or with gaps of some pages between them."""
    rng = np.random.default_rng(seed)
    out = []
    for number in rng.permutation(len(tensors)):
        out.append(tensors[number])
        out.append(rng.bytes(PAGE * int(rng.integers(0, 4))) if gaps else b"")
    return b"".join(out)


@pytest.mark.parametrize("gaps", [False, True])
def test_tensors_that_moved_are_found_again(tmp_path: Path, gaps: bool) -> None:
    """A fine-tune in small: 90% of the bytes frozen, 10% changed, each tensor at a new address of 4K granularity."""
    rng = np.random.default_rng(0)
    sizes = [int(rng.integers(1 * MIB, 4 * MIB)) // PAGE * PAGE for _ in range(24)]
    tensors = [rng.bytes(size) for size in sizes]
    changed, total = 0, sum(sizes)
    after = list(tensors)
    for number, size in enumerate(sizes):
        if changed < 0.09 * total * (number + 1) / len(sizes):
            after[number] = rng.bytes(size)
            changed += size
    repo = LayoutRepository(tmp_path)
    first = store(repo, memory(tensors, 1, gaps))
    data = memory(after, 2, gaps)
    second = store(repo, data, RankReader(repo, first.manifest), "uid-2")
    new = second.stats.raw - second.stats.zero - second.stats.duplicate
    assert changed <= new <= changed + 0.05 * total
    assert second.stats.stored <= new + PAGE
    assert RankReader(repo, second.manifest).read("pages-1.img", len(data)) == data


def test_zeros_cost_nothing(tmp_path: Path) -> None:
    repo = LayoutRepository(tmp_path)
    result = store(repo, bytes(200 * MIB + 5))
    assert (result.stats.zero, result.stats.stored, result.stats.packs) == (200 * MIB + 5, 0, 0)
    assert RankReader(repo, result.manifest).size("pages-1.img") == 200 * MIB + 5


def test_a_repetition_is_stored_once(tmp_path: Path) -> None:
    block = np.random.default_rng(0).bytes(8 * MIB)
    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=0)
    for name in "abc":
        writer.put(name, block)
    result = writer.finish({})
    assert result.stats.duplicate >= 15.9 * MIB
    assert result.stats.stored < 8.1 * MIB


@pytest.mark.parametrize("compress", [True, False])
def test_a_parent_serves_whether_it_is_compressed_or_not(tmp_path: Path, compress: bool) -> None:
    repo = LayoutRepository(tmp_path)
    data = np.random.default_rng(1).standard_normal(1 << 20).astype(np.float32).tobytes()
    results = []
    for uid, squeezed in (("parent", compress), ("child", not compress)):
        parent = RankReader(repo, results[0].manifest) if results else None
        writer = RankWriter(repo, uid=uid, rank=0, parent=parent, options=StoreOptions(compress=squeezed))
        writer.put("pages-1.img", data)
        results.append(writer.finish({}))
    assert results[1].stats.stored == 0
    assert RankReader(repo, results[1].manifest).read("pages-1.img", len(data)) == data
    small = results[0].stats.stored < 0.9 * len(data)
    assert small is compress


def test_small_images_share_frames(tmp_path: Path) -> None:
    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=0)
    for number in range(400):
        writer.put(f"core-{number}.img", np.random.default_rng(number).bytes(300 + number))
    reader = RankReader(repo, writer.finish({}).manifest)
    assert len(reader.index.frames) == 1
    assert len(reader.index.packs) == 1


@pytest.mark.parametrize(("kind", "limit"), [("fp32", 0.86), ("bf16", 0.75), ("noise", 1.001), ("text", 0.1)])
def test_each_kind_of_bytes_is_compressed_as_suits_it(tmp_path: Path, kind: str, limit: float) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(4 * MIB) * 0.02).astype(np.float32)
    data = {
        "fp32": values.tobytes(),
        "bf16": (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "noise": rng.bytes(16 * MIB),
        "text": b"".join(b"step %d loss %.4f\n" % (n, 1 / (n + 1)) for n in range(400_000)),
    }[kind]
    result = store(LayoutRepository(tmp_path), data)
    assert result.stats.stored <= limit * len(data)


def test_a_generation_needs_no_more_requests_than_its_runs(tmp_path: Path) -> None:
    """Chunks scattered over the parent's packs are fetched in ranges, neighbours together."""

    repo = Counting(tmp_path)
    data = bytearray(np.random.default_rng(0).bytes(64 * MIB))
    first = store(repo, bytes(data))
    for at in range(0, len(data), 3 * MIB):  # every third MiB a changed page
        data[at : at + PAGE] = np.random.default_rng(at).bytes(PAGE)
    reader = RankReader(repo, store(repo, bytes(data), RankReader(repo, first.manifest), "uid-2").manifest)
    _ = reader.index
    before = repo.reads
    assert reader.read("pages-1.img", len(data)) == data
    assert repo.reads - before <= 26  # 22 pages changed, 8 runs of 8 MiB


def test_small_gaps_are_read_over(tmp_path: Path) -> None:
    """What a child dropped of its parent's packs lies between what it kept."""
    repo, rng = Counting(tmp_path), np.random.default_rng(0)
    data = rng.integers(0, 4, 48 * MIB, dtype=np.uint8).tobytes()  # a frame is stored in 256 KiB
    first = store(repo, data)
    kept = b"".join(data[at : at + 2 * MIB] for at in range(0, len(data), 3 * MIB))
    reader = RankReader(repo, store(repo, kept, RankReader(repo, first.manifest), "uid-2").manifest)
    _ = reader.index
    before = repo.reads
    assert reader.read("pages-1.img", len(kept)) == kept
    assert repo.reads - before <= 6


def test_many_small_images_are_read_with_few_requests(tmp_path: Path) -> None:
    repo = Counting(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=0)
    for number in range(300):
        writer.put(f"core-{number}.img", b"%d" % number * 50)
    reader = RankReader(repo, writer.finish({}).manifest)
    _ = reader.index
    before = repo.reads
    assert {reader.read(name, 1000) for name in reader.names()} == {b"%d" % number * 50 for number in range(300)}
    assert repo.reads - before == 1


def test_a_reader_goes_on_after_an_error_that_passed(tmp_path: Path) -> None:
    repo, data = Counting(tmp_path), np.random.default_rng(0).bytes(3 * MIB)
    reader = RankReader(repo, store(repo, data).manifest)
    _ = reader.index
    repo.broken = True
    with pytest.raises(Unavailable):
        reader.read("pages-1.img", len(data))
    repo.broken = False
    assert reader.read("pages-1.img", len(data)) == data


def test_a_chain_of_checkpoints_does_not_keep_every_pack_for_the_little_that_stays_of_it(tmp_path: Path) -> None:
    """Of what each checkpoint adds a hundredth stays for ever."""
    rng = np.random.default_rng(3)
    repo = LayoutRepository(tmp_path)
    kept: list[bytes] = []
    parent: RankReader | None = None
    for turn in range(40):
        kept.append(rng.bytes(5 * PAGE))
        data = b"".join(kept) + rng.bytes(2 * MIB)
        result = store(repo, data, parent, uid=f"uid{turn}")
        parent = RankReader(repo, result.manifest.digest)
    assert parent is not None
    assert int(parent.index.packs["size"].sum()) <= 2 * len(data) + MIB
    assert parent.read("pages-1.img", len(data)) == data
