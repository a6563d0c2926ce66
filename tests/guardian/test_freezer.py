"""A trainer's tree is gathered, frozen, thawed and killed as a whole, and nothing else of its container is."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.guardian.dump import dump

from stasis.agent import cgroups, proctree
from stasis.agent.freezer import Freezer, GroupGone
from stasis.errors import CheckpointFailed, DeadlineExceeded, UsageError

pytestmark = pytest.mark.root
Start = Callable[..., Any]


def descendants(root: int) -> set[int]:
    return {pid for pid in proctree.walk(root) if not proctree.dead(pid)}


def test_only_the_tree_freezes(container: Start, version: Any) -> None:
    box = container("beat", 6)
    with Freezer.of(box.pid1, version=version) as freezer:
        assert freezer.path == str(box.groups[version] / "stasis")
        assert freezer.gather(box.root) == descendants(box.root)
        assert box.pid1 not in freezer.pids()
        assert freezer.state() == "thawed"
        assert len(freezer.freeze()) == 7
        assert freezer.state() == "frozen"
        assert box.still()
        assert (box.groups[version] / "cgroup.procs").read_text().split() == [str(box.pid1)]
        freezer.thaw()
        assert freezer.state() == "thawed"
        assert box.runs()


@pytest.mark.parametrize("mode", ["storm", "hop"])
def test_no_fork_escapes(container: Start, version: Any, mode: str) -> None:
    box = container(mode, 4)
    with Freezer.of(box.pid1, version=version) as freezer:
        for _ in range(3):
            freezer.gather(box.root)
            assert freezer.freeze() == descendants(box.root)
            assert box.still()
            freezer.thaw()
            assert box.runs()
            freezer.remove()
            assert (box.groups[version] / "stasis").exists() is False
            assert box.runs()


def test_process_that_hides_from_a_walk_is_found(
    container: Start, version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process forks and ends between two looks of a walk: its successor is missed, all that is seen is dead."""
    box = container("beat", 3)
    hidden, gone, walks = max(descendants(box.root)), subprocess.Popen(["true"]), itertools.count(1)
    gone.wait()
    walk = proctree.walk

    def racing(root: int) -> Iterator[int]:
        number = next(walks)
        for pid in walk(root):
            if pid != hidden or number > 4:
                yield pid
            elif number == 4:
                yield gone.pid

    monkeypatch.setattr(proctree, "walk", racing)
    with Freezer.of(box.pid1, version=version) as freezer:
        assert hidden not in freezer.gather(box.root)
        assert hidden in freezer.freeze()
        assert box.still()


def test_threads_of_a_dead_leader_freeze(container: Start, version: Any) -> None:
    box = container("threads", 8)
    assert box.runs()
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        assert len(freezer.freeze()) == 2
        assert box.still()


def test_killed_tree_runs_no_instruction(container: Start, version: Any) -> None:
    box = container("beat", 16)
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        freezer.freeze()
        before = box.words()
        freezer.kill()
        assert freezer.pids() == set()
        assert box.words() == before
        assert os.path.exists(f"/proc/{box.pid1}")
        freezer.kill()
        freezer.remove()
        freezer.remove()
        freezer.kill()


@pytest.mark.parametrize("mode", ["storm", "hop"])
def test_running_fork_storm_is_killed(container: Start, version: Any, mode: str) -> None:
    box = container(mode, 4)
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        freezer.kill()
        assert descendants(box.root) == set()


def test_task_that_does_not_freeze_is_named_and_all_thawed(container: Start, version: Any) -> None:
    box = container("stuck", 1)
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        with pytest.raises(DeadlineExceeded, match=r"process \d+ \(stasis-workload, waits in \w*userfault\w*\)"):
            freezer.freeze(timeout=0.3)
        assert freezer.state() == "thawed"
        box.poke()
        assert box.runs()
        freezer.freeze()


def test_frozen_group_is_not_removed(container: Start, version: Any) -> None:
    box = container()
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        freezer.freeze()
        with pytest.raises(CheckpointFailed, match="frozen with 5 processes"):
            freezer.remove()
        assert freezer.state() == "frozen"


def test_processes_return_to_groups_of_their_own(container: Start, version: Any) -> None:
    box = container()
    nested = box.groups[version] / "worker"
    nested.mkdir()
    worker = max(descendants(box.root))
    cgroups.move(worker, str(nested))
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        assert freezer.nested == {worker: str(nested)}
        freezer.freeze()
        freezer.thaw()
        freezer.remove()
    assert (nested / "cgroup.procs").read_text().split() == [str(worker)]
    assert not (box.groups[version] / "stasis").exists()


def test_groups_made_below_ours_freeze_too(container: Start, version: Any) -> None:
    box = container()
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        os.mkdir(freezer.path + "/inner")
        cgroups.move(max(descendants(box.root)), freezer.path + "/inner")
        assert freezer.freeze() == descendants(box.root)
        assert box.still()
        freezer.kill()
        freezer.remove()
    assert not os.path.exists(freezer.path)


def test_container_in_the_root_of_the_hierarchy_gets_a_group_by_its_id(container: Start, version: Any) -> None:
    box = container()
    mount = box.groups[version].parent
    cgroups.move(box.pid1, str(mount))
    with Freezer.of(box.pid1, version=version, container_id=box.id) as freezer:
        assert freezer.path == f"{mount}/stasis-{box.id}"
        freezer.gather(box.root)
        freezer.freeze()
        freezer.kill()
        freezer.remove()
    assert not os.path.exists(freezer.path)
    os.kill(box.pid1, 9)


def test_container_in_its_runtimes_group_gets_one_of_its_own(container: Start, version: Any) -> None:
    """On a hybrid machine a runtime with the cgroupfs driver leaves all containers in its own v2 group."""
    box = container()
    runtime = box.groups[version].name
    with Freezer.of(box.pid1, version=version, container_id="0123abcd") as freezer:
        assert freezer.path == str(box.groups[version] / "stasis-0123abcd")
        freezer.gather(box.root)
        assert freezer.freeze() == descendants(box.root)
        freezer.thaw()
        freezer.remove()
    assert Freezer.of(box.pid1, version=version, container_id=runtime).path == str(box.groups[version] / "stasis")


def test_vanished_container_is_told_apart(container: Start, version: Any) -> None:
    box = container()
    freezer = Freezer.of(box.pid1, version=version)
    with pytest.raises(GroupGone, match=r"stasis is gone"):
        freezer.state()
    freezer.gather(box.root)
    freezer.fd  # noqa: B018  open, as the dump holds it
    box.remove()
    for step in (freezer.pids, freezer.freeze, freezer.state):
        with pytest.raises(GroupGone):
            step()
    freezer.thaw()  # nothing frozen is left: unwinding goes on
    freezer.kill()
    freezer.remove()
    with pytest.raises(CheckpointFailed, match="is gone"):
        freezer.gather(box.root)
    with pytest.raises(CheckpointFailed, match="PID 1"):
        Freezer.of(box.pid1, version=version)


def test_environment_chooses_the_version(container: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    box = container()
    monkeypatch.delenv("STASIS_FREEZER", raising=False)
    assert Freezer.of(box.pid1).version == "v2"
    monkeypatch.setenv("STASIS_FREEZER", "v1")
    assert Freezer.of(box.pid1).version == "v1"
    monkeypatch.setenv("STASIS_FREEZER", "v3")
    with pytest.raises(UsageError):
        Freezer.of(box.pid1)


@pytest.mark.criu
def test_criu_dump_leaves_the_tree_frozen(container: Start, version: Any, tmp_path: Path) -> None:
    box = container("beat", 3, whole=True)
    images = tmp_path / "images"
    images.mkdir()
    with Freezer.of(box.pid1, version=version) as freezer:
        freezer.gather(box.root)
        pids = freezer.freeze()
        before = box.words()
        assert dump(box.pid1, box.inner, freezer.fd, images).wait() == 0, (images / "dump.log").read_text()[-3000:]
        assert len(list(images.glob("core-*.img"))) == 4
        assert freezer.state() == "frozen"
        assert freezer.pids() == pids
        time.sleep(0.05)
        assert box.words() == before
        freezer.thaw()
        assert box.runs()
