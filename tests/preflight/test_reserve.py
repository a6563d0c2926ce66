"""Reservations hold over all agents of a node, and a dead agent's are free again at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stasis.agent import cgroups, room
from stasis.agent.reserve import Ledger
from stasis.core.capacity import Amounts, Mode
from stasis.errors import CheckpointFailed, ResourceShort

MIB = 1 << 20
FREE = Amounts(memory=100 * MIB, disk=200 * MIB, descriptors=1000, pipe_pages=1 << 20)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger", lambda _: FREE)


def test_two_gangs_share_what_is_there(ledger: Ledger, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "ledger", lambda _: FREE)  # another agent's
    with (
        ledger.reserve("a/0", 80 * MIB, releases=False) as first,
        other.reserve("b/0", 80 * MIB, releases=False) as second,
    ):
        assert (first.plan.mode, second.plan.mode) == (Mode.COPY, Mode.SPILL)
        assert ledger.reserved() == Amounts(memory=80 * MIB, disk=80 * MIB)
        with pytest.raises(ResourceShort, match="20 MiB of memory and 120 MiB of disk are free"):
            ledger.reserve("c/0", 150 * MIB, releases=False)
    assert ledger.reserved() == Amounts()
    assert ledger.reserve("c/0", 100 * MIB, releases=False).plan.mode == Mode.COPY


def test_a_refusal_reserves_nothing(ledger: Ledger) -> None:
    with pytest.raises(ResourceShort):
        ledger.reserve("a/0", 500 * MIB, releases=False)
    assert ledger.reserved() == Amounts()


def test_what_is_in_use_is_not_counted_twice(ledger: Ledger) -> None:
    with ledger.reserve("a/0", 80 * MIB, releases=False) as held:
        held.spent(Amounts(memory=60 * MIB))
        assert ledger.reserved() == Amounts(memory=20 * MIB)
        held.spent(Amounts(memory=60 * MIB))
        assert ledger.reserved() == Amounts()


def test_the_same_rank_is_not_reserved_twice(ledger: Ledger) -> None:
    with ledger.reserve("../a/0", MIB, releases=True), pytest.raises(CheckpointFailed, match="a/0 is reserved already"):
        ledger.reserve("../a/0", MIB, releases=True)
    ledger.reserve("../a/0", MIB, releases=True).close()


def test_closing_twice_gives_back_nothing_of_another(ledger: Ledger) -> None:
    first = ledger.reserve("a/0", MIB, releases=False)
    first.close()
    with ledger.reserve("a/0", MIB, releases=False):
        first.close()
        assert ledger.reserved() == Amounts(memory=MIB)


def test_a_killed_agent_holds_nothing(ledger: Ledger, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from stasis.agent.reserve import Ledger\n"
        "from stasis.core.capacity import Amounts\n"
        "held = Ledger(Path(sys.argv[1]), lambda _: Amounts(1 << 40)).reserve('dead/0', 90 << 20, releases=False)\n"
        "print('held', flush=True); time.sleep(1000)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "ledger")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as agent:
        try:
            assert agent.stdout
            assert agent.stdout.readline() == b"held\n"
            assert ledger.reserved() == Amounts(memory=90 * MIB)
        finally:
            agent.kill()
            agent.wait()
    assert ledger.reserved() == Amounts()
    assert list((tmp_path / "ledger").glob("*.reservation")) == []


def test_a_nodes_room_is_what_the_system_says(tmp_path: Path) -> None:
    found = room.node_room(tmp_path)
    space = os.statvfs(tmp_path)
    assert 0 < found.memory < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.disk == pytest.approx((space.f_bavail - 0.1 * space.f_blocks) * space.f_frsize, abs=64 * MIB)
    assert found.descriptors > 0
    assert found.pipe_pages in (room.UNLIMITED, int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text()))


@pytest.fixture
def limited() -> Iterator[Callable[[str, str, str], int]]:
    """limited(HIERARCHY, FILE, VALUE): a process in a group with that limit."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(hierarchy: str, file: str, value: str) -> int:
        folder = Path(cgroups.hierarchies()[hierarchy]) / f"stasis-test-room-{os.getpid()}"
        (folder / "below").mkdir(parents=True)
        process = subprocess.Popen(["sleep", "1000"])
        started.append((process, folder))
        (folder / file).write_text(value)
        cgroups.move(process.pid, str(folder / "below"))  # the limit is one above
        return process.pid

    yield start
    for process, folder in started:
        process.kill()
        process.wait()
        for group in (folder / "below", folder):
            while group.exists():
                try:
                    group.rmdir()
                except OSError:  # busy for a moment after the process's end
                    time.sleep(0.01)


@pytest.mark.root
def test_the_tightest_limit_of_memory_above_a_process_counts(limited: Callable[[str, str, str], int]) -> None:
    v1 = "memory" in cgroups.hierarchies()
    pid = limited("memory" if v1 else "", "memory.limit_in_bytes" if v1 else "memory.max", str(64 * MIB))
    assert 0 < room.memory_left(pid, reclaimable=True) <= 64 * MIB
    found = room.container_room(pid)
    assert found.memory is not None
    assert found.memory <= 64 * MIB


@pytest.mark.root
def test_the_limit_of_pids_counts(limited: Callable[[str, str, str], int]) -> None:
    pid = limited("pids" if "pids" in cgroups.hierarchies() else "", "pids.max", "50")
    assert room.container_room(pid).threads == 49


@pytest.mark.root
def test_free_huge_pages_are_counted_by_size() -> None:
    path = Path("/proc/sys/vm/nr_hugepages")
    before = path.read_text()
    try:
        path.write_text("5")
        assert room.huge_pages_free()[2 * MIB] == 5
    finally:
        path.write_text(before)
