"""Containers for tests of freezing: real processes in cgroups of their own, v1 and v2, of which none stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOTS = {"v1": Path("/sys/fs/cgroup/freezer"), "v2": Path("/sys/fs/cgroup/unified")}
NUMBERS = itertools.count()


class Container:
    """PID 1 with a tree below it (workload.c), in a group of each freezer hierarchy, in a network namespace of its own;
    `whole`: in all other namespaces too, so that CRIU can dump it."""

    def __init__(self, beats: Path) -> None:
        self.id = f"stasis-test-{os.getpid()}-{next(NUMBERS)}"
        self.beats = beats
        self.process: subprocess.Popen[bytes] | None = None
        self.groups = {version: root / self.id for version, root in ROOTS.items()}
        for group in self.groups.values():
            group.mkdir()

    def start(self, program: Path, mode: str, count: int, *, whole: bool = False) -> None:
        join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in self.groups.values())
        spaces = ["--mount", "--ipc", "--uts", "--pid", "--fork", "--mount-proc"] if whole else []
        unshare = ["unshare", "--net", *spaces, "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
        self.process = subprocess.Popen(
            ["sh", "-c", join + 'exec "$@"', "sh", *unshare, str(program), str(self.beats), mode, str(count)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        self.inner = int(self.process.stdout.readline())  # the root's pid as the container sees it
        self.pid1 = child(self.process.pid) if whole else self.process.pid
        self.root = child(self.pid1) if whole else self.inner
        assert wait(lambda: sum(word > 0 for word in self.words()) >= (count if mode != "stuck" else 1))

    def words(self) -> tuple[int, ...]:
        """How often each process of the tree has run so far."""
        return struct.unpack("512Q", self.beats.read_bytes())

    def runs(self) -> bool:
        """Whether any process of the tree runs; waits for one to for as long as a busy machine may need."""
        before = self.words()
        return wait(lambda: self.words() != before)

    def still(self) -> bool:
        """Whether no process of the tree runs, for a while in which each would have run often."""
        before = self.words()
        time.sleep(0.05)
        return self.words() == before

    def poke(self) -> None:
        """Let the stuck process go on."""
        with open(self.beats, "r+b") as file:
            file.seek(511 * 8)
            file.write(struct.pack("Q", 1))

    def remove(self) -> None:
        for version, group in self.groups.items():
            remove_group(group, version)
        if self.process is not None:
            self.process.stdout.close()  # type: ignore[union-attr]
            self.process.wait()


def child(pid: int) -> int:
    """A process's only child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def wait(condition: Callable[[], object], timeout: float = 20.0) -> bool:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def remove_group(group: Path, version: str) -> None:
    """Kill what is in a group and below, whatever its state, and delete it."""

    def folders() -> list[Path]:
        return [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]

    def empty() -> bool:
        pids = [int(pid) for folder in folders() for pid in (folder / "cgroup.procs").read_text().split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in folders():
            (folder / ("freezer.state" if version == "v1" else "cgroup.freeze")).write_text(
                "THAWED" if version == "v1" else "0"
            )
        return not pids

    if group.exists():
        assert wait(empty), f"{group} cannot be emptied"
    for folder in folders():
        assert wait(lambda folder=folder: try_rmdir(folder)), f"{folder} cannot be removed"


def try_rmdir(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("workload") / "stasis-workload"
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-Werror", "-pthread", "-static", "-o", program, HERE / "workload.c"], check=True
    )
    return program


@pytest.fixture
def container(workload: Path, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """Starts containers: `container(mode, count)`; afterwards nothing of them is left, whatever the test did."""
    made: list[Container] = []

    def start(mode: str = "beat", count: int = 4, **options: bool) -> Container:
        made.append(Container(tmp_path / f"beats{len(made)}"))
        made[-1].start(workload, mode, count, **options)
        return made[-1]

    yield start
    for one in made:
        one.remove()
    left = [group for root in ROOTS.values() for group in root.glob(f"*stasis-test-{os.getpid()}-*")]
    assert not left


@pytest.fixture(params=["v1", "v2"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(request: pytest.FixtureRequest, container: Any, tmp_path: Path) -> Iterator[Any]:
    from tests.guardian.bench import Bench  # which needs this file

    made = Bench(container("beat", 3), tmp_path, getattr(request, "param", "v1"))
    yield made
    made.close()
