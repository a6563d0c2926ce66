"""What is not as it was written, or never was a checkpoint of ours, is Corrupt: by name, and before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.reader.checkpoint import CONFIG, write
from tests.reader.conftest import StartReader

from stasis.agent.criu_images import ImageCodec
from stasis.errors import Corrupt, StasisError, Unsupported
from stasis.store.connect import open_repository
from stasis.store.reader import RankReader

pytestmark = pytest.mark.root

Images = dict[str, bytes]


@pytest.mark.parametrize("kind", ["manifest", "config", "index"])
def test_a_damaged_blob_is_named(start: StartReader, folder: tuple[str, str], tmp_path: Path, kind: str) -> None:
    shutil.copytree(folder[0], tmp_path / "store")
    repository = open_repository(tmp_path / "store")
    config, index, *_ = RankReader(repository, folder[1]).blobs
    digest = {"manifest": folder[1], "config": config.digest, "index": index.digest}[kind]
    path = tmp_path / "store/blobs" / digest.replace(":", "/")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    reader = start((str(tmp_path / "store"), folder[1]))
    with pytest.raises(Corrupt, match=digest):
        reader.config()
        reader.prepare([])


def test_a_damaged_pack_is_named_where_its_bytes_are_due(
    start: StartReader, folder: tuple[str, str], tmp_path: Path
) -> None:
    shutil.copytree(folder[0], tmp_path / "store")
    packs = [
        blob for blob in RankReader(open_repository(tmp_path / "store"), folder[1]).blobs[2:] if blob.size > 1 << 20
    ]
    for pack in packs:
        path = tmp_path / "store/blobs" / pack.digest.replace(":", "/")
        path.write_bytes(bytes(pack.size))
    reader = start((str(tmp_path / "store"), folder[1]))
    reader.config()
    with open(tmp_path / "sink", "wb") as sink, pytest.raises(Corrupt, match="pack sha256:"):
        reader.start("files/shm", sink.fileno()).wait()


def cut(name: str, by: int) -> Callable[[Images], None]:
    return lambda images: images.update({f"criu/{name}": images[f"criu/{name}"][:-by]})


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        (lambda images: images.pop("criu/pstree.img"), Corrupt, "pstree.img"),
        (lambda images: images.pop("criu/files.img"), Corrupt, "files.img"),
        (lambda images: images.pop("criu/core-8.img"), Corrupt, "core-8.img"),
        (lambda images: images.pop("criu/seccomp.img"), Corrupt, "seccomp filter 1 of 0"),
        (lambda images: images.pop("criu/tcp-stream-ab.img"), Corrupt, "tcp-stream-ab.img"),
        (lambda images: images.update({"criu/core-7.img": b""}), Corrupt, "core-7.img"),
        (lambda images: images.update({"criu/core-7.img": b"\xff" * 100}), Unsupported, "core-7.img"),
        (lambda images: images.update({"criu/files.img": images["criu/core-7.img"]}), Corrupt, "manifest sha256:"),
        (lambda images: images.update({"criu/../../x": b"x"}), Corrupt, "is no name of an image"),
        (cut("core-7.img", 3), Corrupt, "core-7.img"),
        (cut("files.img", 1), Corrupt, "files.img"),
        (cut("tcp-stream-ab.img", 1), Corrupt, "tcp-stream"),
    ],
)
def test_images_that_are_none(
    start: StartReader,
    content: Images,
    tmp_path: Path,
    change: Callable[[Images], object],
    kind: type[StasisError],
    named: str,
) -> None:
    images = {name: data for name, data in content.items() if len(data) < 1 << 20}
    change(images)
    reader = start((str(tmp_path / "store"), write(open_repository(tmp_path / "store"), images)))
    assert reader.config() == CONFIG
    with pytest.raises(kind, match=named):
        reader.prepare([])


def test_images_that_would_fill_the_memory(start: StartReader, content: Images, tmp_path: Path) -> None:
    large = bytes(63 << 20)  # nothing, stored: a hole
    images = {name: data for name, data in content.items() if len(data) < 1 << 20}
    images |= {f"criu/x-{number}.img": large for number in range(17)}
    reader = start((str(tmp_path / "store"), write(open_repository(tmp_path / "store"), images)))
    reader.config()
    with pytest.raises(Corrupt, match="have more than"):
        reader.prepare([])


@pytest.mark.parametrize("fix", [{"cut": 3}, {"cut": "3", "outq_len": 5}, {"cut": 4, "outq_len": 5}, 7])
def test_fixes_that_are_none(
    start: StartReader, content: Images, tmp_path: Path, codec: ImageCodec, fix: object
) -> None:
    images = {name: data for name, data in content.items() if len(data) < 1 << 20}
    config = {**CONFIG.to_dict(), "fixes": {"171": fix}}
    reader = start((str(tmp_path / "store"), write(open_repository(tmp_path / "store"), images, config)))
    reader.config()
    with pytest.raises(Corrupt):
        reader.prepare([])
