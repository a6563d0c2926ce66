"""Whatever happens to a blob, `verify` and what a restore reads both refuse it by name: every blob x first, middle,
last and 100 seeded positions, cut, missing, another valid blob's bytes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stasis.errors import Corrupt
from stasis.store import media
from stasis.store.checkpoint import copy, list_checkpoints, open_checkpoint, publish, verify
from stasis.store.layout import LayoutRepository
from stasis.store.reader import RankReader
from stasis.store.writer import RankWriter


def write(folder: Path) -> None:
    """Two ranks, the second checkpoint with packs of the first; packs of all strides."""
    repo, rng = LayoutRepository(folder), np.random.default_rng(0)
    fp32 = (rng.standard_normal(80_000) * 0.02).astype(np.float32).tobytes()
    parents: dict[int, RankReader] = {}
    for step in (1, 2):
        manifests = []
        for rank in (0, 1):
            writer = RankWriter(repo, uid=f"uid-{step}", rank=rank, parent=parents.get(rank))
            writer.put("pages-1.img", bytes(8192) + fp32)
            writer.put("log", b"a log of step %d " % step * 100 + rng.bytes(3000))
            manifests.append(writer.finish({"rank": rank}).manifest)
            parents[rank] = RankReader(repo, manifests[-1])
        publish(repo, f"step-{step}", f"uid-{step}", manifests, {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corrupt") / "store"
    write(folder)
    return folder


def restore(where: str) -> None:
    """All that a restore reads."""
    with open_checkpoint(where) as checkpoint, open(os.devnull, "wb") as sink:
        for rank in checkpoint.ranks:
            assert rank.config == {"rank": rank.rank}
            for name in rank.names():
                rank.copy_to(name, sink.fileno())


def blobs_of(folder: Path, tag: str) -> list[str]:
    with open_checkpoint(f"{folder}:{tag}") as checkpoint:
        found = [checkpoint.digest]
        for rank in checkpoint.ranks:
            manifest = checkpoint.repository.get_manifest(rank.digest)
            found += [rank.digest, *(descriptor.digest for descriptor in manifest.needs)]
    return sorted(set(found))


def must_be_refused(folder: Path, digest: str, action: Callable[[str], object], tag: str = "step-1") -> None:
    with pytest.raises(Corrupt) as caught:
        action(f"{folder}:{tag}")
    assert digest in str(caught.value)


@pytest.fixture
def damaged(folder: Path) -> Iterator[Callable[[str, bytes | None], None]]:
    """Puts other bytes (or none) in a blob's place until the test is over."""
    kept: dict[Path, bytes] = {}

    def damage(digest: str, data: bytes | None) -> None:
        path = folder / "blobs" / digest.replace(":", "/")
        kept.setdefault(path, path.read_bytes() if path.exists() else b"")
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)

    yield damage
    for path, data in kept.items():
        path.write_bytes(data)


def content(folder: Path, digest: str) -> bytes:
    return (folder / "blobs" / digest.replace(":", "/")).read_bytes()


KINDS = range(9)  # blobs of step-1: image index; of each rank: manifest, config, index, pack


def test_the_matrix_has_every_blob(folder: Path) -> None:
    assert len(blobs_of(folder, "step-1")) == len(KINDS)


@pytest.mark.parametrize("number", KINDS)
def test_a_flipped_bit_anywhere_is_found(
    folder: Path, damaged: Callable[[str, bytes | None], None], number: int
) -> None:
    digest = blobs_of(folder, "step-1")[number]
    data, rng = content(folder, digest), random.Random(number)
    for at in [0, len(data) // 2, len(data) - 1, *(rng.randrange(len(data)) for _ in range(100))]:
        damaged(digest, data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        must_be_refused(folder, digest, verify)
        must_be_refused(folder, digest, restore)
    damaged(digest, data)
    verify(f"{folder}:step-1")


def test_a_flipped_bit_that_decodes_to_the_same_bytes_is_found(
    folder: Path, damaged: Callable[[str, bytes | None], None]
) -> None:
    """zstd ignores a bit of its frame header: all chunks come out right, yet the pack is not as it was written."""
    with open_checkpoint(f"{folder}:step-1") as checkpoint:
        pack = checkpoint.ranks[0].index.pack_digest(0)
    data = bytearray(content(folder, pack))
    at = data.index(b"\x28\xb5\x2f\xfd") + 4
    data[at] ^= 0x10
    damaged(pack, bytes(data))
    must_be_refused(folder, pack, verify)
    must_be_refused(folder, pack, restore)


@pytest.mark.parametrize("number", KINDS)
def test_a_blob_that_is_cut_missing_or_another_is_found(
    folder: Path, damaged: Callable[[str, bytes | None], None], number: int
) -> None:
    every = blobs_of(folder, "step-1")
    digest = every[number]
    data = content(folder, digest)
    others = [content(folder, other) for other in every if other != digest]
    for bad in [data[: len(data) // 2], data[:-1], b"", data + b"x", *others]:
        damaged(digest, bad)
        must_be_refused(folder, digest, verify)
        if bad[: len(data)] != data:  # a restore reads no bytes behind a blob's end
            must_be_refused(folder, digest, restore)
    damaged(digest, None)
    must_be_refused(folder, digest, verify)
    must_be_refused(folder, digest, restore)


def test_a_damaged_checkpoint_is_not_copied(
    folder: Path, damaged: Callable[[str, bytes | None], None], tmp_path: Path
) -> None:
    with open_checkpoint(f"{folder}:step-1") as checkpoint:
        pack = checkpoint.ranks[0].index.pack_digest(0)
    data = content(folder, pack)
    damaged(pack, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt, match=pack):
        copy(f"{folder}:step-1", f"{tmp_path}/target")
    assert list_checkpoints(tmp_path / "target") == []


@pytest.mark.parametrize("layer", [0, 1])  # index, pack
def test_a_damaged_parent_is_not_built_upon(folder: Path, tmp_path: Path, layer: int) -> None:
    shutil.copytree(folder, tmp_path / "store")
    repo = LayoutRepository(tmp_path / "store")
    with open_checkpoint(f"{tmp_path}/store:step-1") as checkpoint:
        parent = checkpoint.ranks[0]
        streams = {name: parent.read(name, 1 << 20) for name in parent.names()}
    damaged = repo.get_manifest(parent.digest).children[layer].digest
    path = tmp_path / "store" / "blobs" / damaged.replace(":", "/")
    path.write_bytes(path.read_bytes()[:-10])
    writer = RankWriter(repo, uid="new", rank=0, parent=RankReader(repo, parent.digest))
    for name, data in streams.items():
        writer.put(name, data)
    result = writer.finish({})
    assert result.stats.stored > 100_000
    child = RankReader(repo, result.manifest)
    child.verify()
    assert {name: child.read(name, 1 << 20) for name in child.names()} == streams


def test_ranks_and_parts_of_another_checkpoint_are_refused(folder: Path, tmp_path: Path) -> None:
    """Each part is valid, but they do not belong together: a restore never mixes two checkpoints."""
    shutil.copytree(folder, tmp_path / "store")
    repo = LayoutRepository(tmp_path / "store")
    one, two = (repo.get_manifest(f"step-{step}") for step in (1, 2))
    mixed = media.checkpoint_index("uid-1", [one.children[0], two.children[1]], {})
    repo.put_manifest(mixed, media.IMAGE_INDEX, "mixed")
    with pytest.raises(Corrupt, match="uid-1"):
        open_checkpoint(f"{tmp_path}/store:mixed")
    ranks = [repo.get_manifest(image.children[0].digest) for image in (one, two)]
    assert ranks[0].config
    for config, layers in (
        (ranks[1].config, ranks[0].children),
        (ranks[0].config, ranks[1].children),
        (ranks[0].config, ranks[0].children[:1]),  # packs not listed
    ):
        assert config
        body = media.rank_manifest("uid-1", 0, config, layers)
        child = repo.put_manifest(body, media.MANIFEST)
        image = media.checkpoint_index("uid-1", [child], {})
        repo.put_manifest(image, media.IMAGE_INDEX, "forged")
        for action in (verify, restore):
            with pytest.raises(Corrupt):
                action(f"{tmp_path}/store:forged")
