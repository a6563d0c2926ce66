"""Files on volumes that a checkpoint does not hold: noted while they are open, compared at the restore."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files.conftest import Box

from stasis.agent.files.volumes import VolumeFile, differences, open_files, volume_points

pytestmark = pytest.mark.root


@pytest.fixture
def pvc(tmp_path: Path) -> Path:
    folder = tmp_path / "pvc"
    (folder / "set").mkdir(parents=True)
    for name in ("data", "log", "set/gone", "..2026_12_01/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{name} of the volume")
    return folder


def make(boxes: Callable[..., Box], pvc: Path) -> Box:
    box = boxes()
    box.volume("/pvc", source=pvc)
    (box.volume("/ed") / "carried").write_text("x")
    return box


def test_open_files_on_volumes_are_noted_and_others_are_not(boxes: Callable[..., Box], pvc: Path) -> None:
    box = make(boxes, pvc).start(
        "/pvc/data", "/pvc/set/gone", "/ed/carried", "/etc/hosts", "/pvc/log", "/pvc/..2026_12_01/config"
    )
    assert volume_points(box.pid, ["/ed", "/stasis"]) == {"/pvc", "/dev/shm"}
    assert volume_points(box.pid, ["/ed", "/stasis", "/dev/shm"]) == {"/pvc"}
    os.unlink(pvc / "log")
    files = open_files(box.pid, [box.pid], ["/ed", "/stasis", "/dev/shm"])
    status = (pvc / "data").stat()
    assert files[0] == VolumeFile("/pvc/data", status.st_size, status.st_mtime_ns)
    assert [file.path for file in files] == ["/pvc/data", "/pvc/set/gone"]
    assert open_files(box.pid, [1 << 22], []) == []


def test_mapped_files_are_noted(boxes: Callable[..., Box], pvc: Path, tmp_path: Path) -> None:
    """Only the mapping holds the file, as with numpy's memmap."""
    box = make(boxes, pvc).start("/pvc/data", "mmap")
    files = open_files(box.pid, [box.pid], ["/ed", "/stasis", "/dev/shm"])
    assert [file.path for file in files] == ["/pvc/data"]


def test_what_has_changed_since_is_told(boxes: Callable[..., Box], pvc: Path, tmp_path: Path) -> None:
    box = make(boxes, pvc).start("/pvc/data", "/pvc/set/gone", "/pvc/log")
    files = open_files(box.pid, [box.pid], ["/ed"])
    new = make(boxes, pvc).start()
    assert differences(new.pid, files) == []
    with open(pvc / "log", "a") as log:
        log.write(", and more")
    os.utime(pvc / "data", ns=(0, 1))
    os.unlink(pvc / "set/gone")
    (tmp_path / "outside").write_text("gone of the volume")
    os.symlink(tmp_path / "outside", pvc / "set/gone")
    assert [str(difference) for difference in differences(new.pid, files)] == [
        "/pvc/data was written to since the checkpoint (same size)",
        "/pvc/log had 17 bytes at the checkpoint and has 27",
        "/pvc/set/gone was open at the checkpoint and is gone",
    ]
