"""Nothing of the host is read or written, whatever symlinks a container has, also while they are swapped."""

import contextlib
import ctypes
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.files.conftest import Box, seen

from stasis.agent.files.capture import areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import lay, remove
from stasis.errors import StasisError, UsageError

pytestmark = pytest.mark.root
POINTS = {"upper": "", "emptydir:/ed": "ed", "shm": "dev/shm"}
SECRET = b"the host's secret"
RENAME_EXCHANGE = 2
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder of the host that no container may reach."""
    folder = tmp_path / "secret"
    (folder / "sub").mkdir(parents=True)
    (folder / "key").write_bytes(SECRET)
    (folder / "sub/key").write_bytes(SECRET)
    return folder


@pytest.fixture
def box(boxes: Callable[..., Box]) -> Box:
    made = boxes()
    made.volume("/ed")
    return made.start()


@pytest.mark.parametrize("name", POINTS)
def test_planted_symlinks_are_carried_as_symlinks(
    box: Box, boxes: Callable[..., Box], secret: Path, tmp_path: Path, name: str
) -> None:
    top = box.root / POINTS[name]
    for text in (str(secret), str(secret / "key"), "../" * 20 + str(secret), f"/proc/{os.getpid()}/root", "loop"):
        os.symlink(text, top / f"planted{len(text)}")
    os.symlink("loop", top / "loop")
    area = next(a for a in areas(box.pid, ["/ed"]) if a.name == name)
    content = b"".join(map(bytes, capture(area)))
    assert SECRET not in content
    new = boxes()
    new.volume("/ed")
    new.start()
    with LaidList(tmp_path / "list") as record:
        lay(new.pid, name, io.BytesIO(content), record)
    assert seen(new.root / POINTS[name]) == seen(top)
    assert (secret / "key").read_bytes() == SECRET


def test_a_volume_named_through_a_symlink_stays_in_the_container(boxes: Callable[..., Box], secret: Path) -> None:
    """The image may have symlinks on the way to a mount point; one that leads out is resolved inside."""
    box = boxes()
    box.volume("/var/log")
    box.start()
    assert [a.name for a in areas(box.pid, ["/logs"])] == ["upper", "shm", "emptydir:/var/log"]
    os.symlink(secret, box.root / "tmp/out")
    with pytest.raises(UsageError, match="/tmp/out"):
        areas(box.pid, ["/tmp/out"])


@contextlib.contextmanager
def swapping(one: Path, other: Path) -> Iterator[None]:
    """Exchange two names, over and over, while the with statement runs and both are there."""
    stop = threading.Event()
    swaps = [0]

    def swap() -> None:
        while not stop.is_set():
            swaps[0] += libc.renameat2(-100, bytes(one), -100, bytes(other), RENAME_EXCHANGE) == 0

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert swaps[0] > 10


@pytest.mark.parametrize("name", ["emptydir:/ed", "shm"])
def test_a_folder_that_is_swapped_for_a_symlink_is_not_read_through(box: Box, secret: Path, name: str) -> None:
    top = box.root / POINTS[name]
    (top / "a/sub").mkdir(parents=True)
    for path in ("a/key", "a/sub/key"):
        (top / path).write_text("the container's")
    os.symlink(secret, top / "b")
    area = next(a for a in areas(box.pid, ["/ed"]) if a.name == name)
    with swapping(top / "a", top / "b"):
        for _ in range(100):
            assert not any(SECRET in bytes(block) for block in capture(area))


@pytest.mark.parametrize("name", POINTS)
def test_a_folder_that_is_swapped_for_a_symlink_is_not_written_or_removed_through(
    box: Box, boxes: Callable[..., Box], secret: Path, name: str, tmp_path: Path
) -> None:
    source = boxes()
    source.volume("/ed")
    source.start()
    (source.root / POINTS[name] / "a/sub").mkdir(parents=True)
    for path in ("a/key", "a/new", "a/sub/key"):
        (source.root / POINTS[name] / path).write_text("the archive's")
    area = next(a for a in areas(source.pid, ["/ed"]) if a.name == name)
    content = b"".join(map(bytes, capture(area)))
    top = box.root / POINTS[name]
    before = seen(secret)
    (top / "a").mkdir()
    os.symlink(secret, top / "b")
    with swapping(top / "a", top / "b"):
        for _ in range(40):
            with contextlib.suppress(StasisError, OSError), LaidList(tmp_path / "list") as record:
                lay(box.pid, name, io.BytesIO(content), record)
            with contextlib.suppress(StasisError, OSError):
                remove(box.pid, LaidList(tmp_path / "list"))
            if not os.path.lexists(top / "b"):
                os.symlink(secret, top / "b")
            if not os.path.lexists(top / "a"):
                (top / "a").mkdir()
    assert seen(secret) == before
