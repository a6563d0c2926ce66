"""A folder's blobs are what was given, however long, wherever they lie in memory and whatever file system it is on."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stasis.store.layout import LayoutRepository
from stasis.store.media import PACK, Descriptor, digest_of
from stasis.store.repository import read

MIB = 1 << 20


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """tmpfs has no direct writes, as some file systems."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="stasis-test-") as name:
        yield Path(name)


@pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 3 * MIB + 4097])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_a_blob_is_what_was_given(folder: Path, size: int, shift: int) -> None:
    memory = mmap.mmap(-1, shift + size)
    memory[shift:] = os.urandom(size)
    view = memoryview(memory)[shift:]
    repo = LayoutRepository(folder)
    for parts in ([view], [view[: size // 2], view[size // 2 :]]):
        blob = Descriptor(PACK, digest_of(*parts), size)
        repo.push(blob, parts)
        assert read(repo, blob.digest, 0, size) == bytes(view)
        (folder / "blobs" / "sha256" / blob.digest.removeprefix("sha256:")).unlink()
