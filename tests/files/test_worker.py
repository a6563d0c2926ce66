"""Files are laid by a process in the pod's cgroup, so that the pod is charged for them; its errors come through."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.files.conftest import Box, seen

from stasis.agent import cgroups, privileges, proctree
from stasis.agent.files.capture import areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import remove
from stasis.agent.files.worker import NEEDED, Worker, lay_in_child
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


def test_a_worker_that_was_started_ahead_ends_with_the_agent() -> None:
    code = (
        "import os\nfrom stasis.agent.files.worker import Worker\nprint(Worker()._child.pid, flush=True)\nos._exit(9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    agent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert agent.returncode == 9
    end = time.monotonic() + 30
    while os.path.exists(f"/proc/{int(agent.stdout)}") and time.monotonic() < end:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{int(agent.stdout)}")


def test_a_worker_lays_once_and_can_be_closed_at_any_time(boxes: Callable[..., Box], tmp_path: Path) -> None:
    old, new = boxes().start(), boxes().start()
    (old.root / "dev/shm/model").write_bytes(b"weights")
    with Worker() as worker, stream(taken(old)) as fd:
        assert worker.alive
        assert worker.lay(new.pid, "shm", fd, tmp_path / "list", []).data == 7
        assert not worker.alive
    unused = Worker()
    unused.close()
    unused.close()
    assert not unused.alive


# A process in the container that cannot come to have CAP_SYS_ADMIN, as those of a common pod.
COMMON = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
mounts = os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY)
assert libc.setns(mounts, 0x20000) == 0 and libc.prctl(24, 21, 0, 0, 0) == 0
print(flush=True)
signal.pause()
"""


@pytest.fixture
def common() -> Iterator[Callable[[int], int]]:
    started = []

    def start(pid: int) -> int:
        process = subprocess.Popen([sys.executable, "-I", "-c", COMMON, str(pid)], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def confined() -> dict[str, list[str]]:
    """Of the child that lays files, once it has given its privileges up: /proc/PID/status."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for pid in proctree.walk(os.getpid()):
            lines = [line.partition(":") for line in proctree.read(pid, pid, "status").splitlines()]
            status = {name: value.split() for name, _, value in lines}
            if pid != os.getpid() and status.get("NoNewPrivs") == ["1"]:
                return status
        time.sleep(0.01)
    raise AssertionError("no child without new privileges")


@pytest.mark.parametrize("whose", ["root's", "a common one's"])
def test_the_child_keeps_only_what_laying_takes(
    boxes: Callable[..., Box], common: Callable[[int], int], tmp_path: Path, whose: str
) -> None:
    """And sets trusted.* only in a container that could do so itself."""
    old, new = boxes().start(), boxes().start()
    path = old.root / "dev/shm/model"
    path.write_bytes(b"weights")
    os.setxattr(path, "trusted.t", b"1")
    os.chown(path, 1234, 55)
    content, pid = taken(old), new.pid if whose == "root's" else common(new.pid)
    read, write = os.pipe()
    result: list[object] = []

    def run() -> None:
        try:
            result.append(lay_in_child(pid, "shm", read, tmp_path / "list", []))
        except RestoreFailed as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        status = confined()
        os.write(write, content)
    finally:
        os.close(write)
        thread.join()
        os.close(read)
    kept = sum(1 << one for one in (*NEEDED, *([privileges.SYS_ADMIN] if pid == new.pid else [])))
    assert {kind: int(status[f"Cap{kind}"][0], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {
        **dict.fromkeys(("Prm", "Eff", "Bnd"), kept),
        **dict.fromkeys(("Inh", "Amb"), 0),
    }
    if pid == new.pid:
        assert seen(new.root / "dev/shm") == seen(old.root / "dev/shm")
    else:
        assert "Operation not permitted" in str(result[0])
