"""All packs are read and checked before anything is done with them, and those of a registry are read once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.reader.checkpoint import write
from tests.reader.conftest import StartReader, Taken
from tests.registry.conftest import Registry

from stasis.agent.room import UNLIMITED, unlinked_file
from stasis.errors import Corrupt, StasisError
from stasis.store.connect import open_repository
from stasis.store.reader import RankReader

pytestmark = pytest.mark.root

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "last": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[: len(data) // 2],
}


def last_pack(where: tuple[str, str]) -> str:
    return RankReader(open_repository(where[0]), where[1]).blobs[-1].digest


@pytest.mark.parametrize("how", [*DAMAGES, "missing"])
def test_a_damaged_pack_of_a_folder(start: StartReader, folder: tuple[str, str], tmp_path: Path, how: str) -> None:
    where = (shutil.copytree(folder[0], tmp_path / "store"), folder[1])
    digest = last_pack((str(where[0]), where[1]))
    path = Path(where[0]) / "blobs" / digest.replace(":", "/")
    data = path.read_bytes()
    path.unlink()
    if how in DAMAGES:
        path.write_bytes(DAMAGES[how](data))
    reader = start((str(where[0]), where[1]))
    reader.config()
    with pytest.raises(Corrupt, match=digest):
        reader.fetch(None).wait()


@pytest.mark.registry
@pytest.mark.parametrize("how", ["middle", "last"])
def test_a_damaged_pack_of_a_registry(
    start: StartReader, registry: Registry, content: dict[str, bytes], how: str, tmp_path: Path
) -> None:
    where = (f"{registry.host}/gang", write(open_repository(f"{registry.host}/gang"), content))
    path = registry.blob(digest := last_pack(where))
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    reader = start(where)
    reader.config()
    with open(tmp_path / "spool", "w+b") as spool, pytest.raises(Corrupt, match=digest):
        reader.fetch(spool.fileno()).wait()


@pytest.mark.registry
def test_what_was_fetched_comes_though_the_registry_is_gone(
    start: StartReader, registry: Registry, content: dict[str, bytes], taken: Taken, tmp_path: Path
) -> None:
    where = (f"{registry.host}/gang", write(open_repository(f"{registry.host}/gang"), content))
    reader = start(where)
    reader.config()
    described = reader.prepare([])
    assert described.packed >= 60 << 20
    spool = unlinked_file(tmp_path, described.packed)
    assert spool is not None
    reader.fetch(spool).wait()
    os.close(spool)
    registry.stop()
    for name in ("criu/pages-1.img", "criu/pages-2.img", "files/shm"):
        fd, coming = taken.pipe()
        call = reader.start(name, fd)
        os.close(fd)
        call.wait()
        assert coming.result() == content[name]


def test_a_reader_that_ends_meanwhile_is_told_of(start: StartReader, folder: tuple[str, str]) -> None:
    reader = start(folder)
    reader.config()
    reader.kill()
    with pytest.raises(StasisError):
        reader.fetch(None).wait()


def test_no_room_for_a_file(tmp_path: Path) -> None:
    assert unlinked_file(tmp_path, UNLIMITED) is None
