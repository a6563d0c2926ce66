"""Files are laid by a process in the pod's cgroup, so that the pod is charged for them; its errors come through."""

import io
import os
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.files.conftest import Box, seen

from stasis.agent import cgroups
from stasis.agent.files.capture import areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import remove
from stasis.agent.files.worker import lay_in_child
from stasis.errors import Corrupt, ResourceShort, RestoreFailed

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    """A cgroup for the pod, in the hierarchy of the memory controller."""
    found = cgroups.hierarchies()
    group = Path(found.get("memory") or found[""]) / f"stasis-test-files-{os.getpid()}"
    group.mkdir()
    yield group
    for empty in ("memory.force_empty", "memory.reclaim"):
        if (group / empty).exists():
            (group / empty).write_text("0" if empty.endswith("empty") else "64M")
    group.rmdir()


def charged(group: Path) -> int:
    return int(next(p for p in (group / "memory.usage_in_bytes", group / "memory.current") if p.exists()).read_text())


@contextmanager
def stream(content: bytes) -> Iterator[int]:
    """The read end of a pipe that gives these bytes."""
    read, write = os.pipe()

    def feed() -> None:
        with os.fdopen(write, "wb") as pipe:
            try:
                pipe.write(content)
            except BrokenPipeError:
                pass

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield read
    finally:
        os.close(read)
        thread.join()


def taken(box: Box) -> bytes:
    return b"".join(map(bytes, capture(areas(box.pid)[-1])))


def test_the_pod_is_charged_and_the_agent_is_not(boxes: Callable[..., Box], memory: Path, tmp_path: Path) -> None:
    old, new = boxes().start(), boxes().start()
    (old.root / "dev/shm/model").write_bytes(os.urandom(24 * MIB))
    with stream(taken(old)) as fd:
        stats = lay_in_child(new.pid, "shm", fd, tmp_path / "list", [str(memory)])
    assert stats.data == 24 * MIB
    assert charged(memory) >= 24 * MIB
    assert seen(new.root / "dev/shm") == seen(old.root / "dev/shm")
    remove(new.pid, LaidList(tmp_path / "list"))
    assert charged(memory) < 16 * MIB
    assert os.listdir(new.root / "dev/shm") == []


def test_the_pods_limit_kills_the_child_and_what_it_laid_is_removed(
    boxes: Callable[..., Box], memory: Path, tmp_path: Path
) -> None:
    old, new = boxes(shm="256m").start(), boxes(shm="256m").start()
    (old.root / "dev/shm/model").write_bytes(os.urandom(100 * MIB))
    limit = next(p for p in (memory / "memory.limit_in_bytes", memory / "memory.max") if p.exists())
    limit.write_text(str(48 * MIB))
    with stream(taken(old)) as fd, pytest.raises(RestoreFailed, match=f"signal {signal.SIGKILL.value}"):
        lay_in_child(new.pid, "shm", fd, tmp_path / "list", [str(memory)])
    remove(new.pid, LaidList(tmp_path / "list"))
    assert os.listdir(new.root / "dev/shm") == []


def test_errors_come_through_with_their_class(boxes: Callable[..., Box], tmp_path: Path) -> None:
    old, new = boxes().start(), boxes(shm="1m").start()
    (old.root / "dev/shm/model").write_bytes(os.urandom(4 * MIB))
    content = taken(old)
    with stream(content) as fd, pytest.raises(ResourceShort, match="1 MiB") as full:
        lay_in_child(new.pid, "shm", fd, tmp_path / "list", [])
    assert "as much room" in full.value.remedy
    with stream(content[:5000]) as fd, pytest.raises(Corrupt, match="ends early"):
        lay_in_child(new.pid, "shm", fd, tmp_path / "list", [])
    forged = io.BytesIO()
    with tarfile.open(fileobj=forged, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("\udcff/../x"))
    with stream(forged.getvalue()) as fd, pytest.raises(Corrupt, match="not one below"):
        lay_in_child(new.pid, "shm", fd, tmp_path / "list", [])
    with stream(content) as fd, pytest.raises(RestoreFailed, match="nowhere"):
        lay_in_child(new.pid, "shm", fd, tmp_path / "list", ["/nowhere"])


def test_a_stream_that_never_ends_is_given_up(boxes: Callable[..., Box], tmp_path: Path) -> None:
    new = boxes().start()
    read, write = os.pipe()
    try:
        with pytest.raises(RestoreFailed, match="longer than"):
            lay_in_child(new.pid, "shm", read, tmp_path / "list", [], timeout=0.3)
    finally:
        os.close(read)
        os.close(write)
