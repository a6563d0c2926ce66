"""Groups that a job has made below its container's are made again in the new container, with their processes."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.preflight.conftest import Pod

from stasis.agent import cgroups
from stasis.agent.lookup import inner_pids
from stasis.agent.nested import nested_groups, rejoin, remake
from stasis.errors import Corrupt

pytestmark = pytest.mark.root


def hierarchy() -> tuple[str, Path]:
    """One that has memory limits: of v1, else of v2."""
    mounts = cgroups.hierarchies()
    name = "memory" if "memory" in mounts else ""
    return name, Path(mounts[name])


@pytest.fixture
def contained(pod: Callable[[str], Pod]) -> Iterator[Callable[[], tuple[Pod, str, Path]]]:
    """contained(): a container with a group of its own, its id, its group's folder."""
    made: list[Path] = []

    def start() -> tuple[Pod, str, Path]:
        container, name = pod("ready()\nos._exit(0)"), uuid.uuid4().hex
        folder = hierarchy()[1] / f"stasis-test-{name}"
        folder.mkdir()
        made.append(folder)
        for pid in (container.pid1, container.root.pid, container.trainer):
            cgroups.move(pid, str(folder))
        return container, name, folder

    yield start
    for folder in made:
        for below in sorted((Path(one) for one, _, _ in os.walk(folder)), reverse=True):
            for pid in (below / "cgroup.procs").read_text().split():
                cgroups.move(int(pid), str(hierarchy()[1]))
            for _ in range(200):
                try:
                    below.rmdir()
                    break
                except OSError:  # a group is busy for a moment after its last process left
                    time.sleep(0.01)


def test_a_nested_group_is_made_again_with_its_process_and_limit(
    contained: Callable[[], tuple[Pod, str, Path]],
) -> None:
    (old, old_id, group), (new, new_id, target) = contained(), contained()
    limit = "memory.limit_in_bytes" if hierarchy()[0] else "memory.max"
    (group / "a" / "worker").mkdir(parents=True)
    if limited := (group / "a" / "worker" / limit).exists():
        (group / "a" / "worker" / limit).write_text("1073741824")
    cgroups.move(old.trainer, str(group / "a" / "worker"))

    recorded = nested_groups(old.pid1, old.root, old_id)
    assert [(entry["path"], entry["processes"]) for entry in recorded] == [("a/worker", [inner_pids(old.trainer)[-1]])]
    remake(new.pid1, recorded, new_id)
    remake(new.pid1, recorded, new_id)  # a second attempt of a restore
    assert rejoin(new.pid1, new.root, recorded, new_id, freezer="no such hierarchy") == {}

    assert (target / "a" / "worker" / "cgroup.procs").read_text().split() == [str(new.trainer)]
    assert not limited or (target / "a" / "worker" / limit).read_text() == "1073741824\n"
    assert nested_groups(new.pid1, new.root, new_id) == recorded


def test_in_the_freezers_hierarchy_nothing_is_moved_yet(contained: Callable[[], tuple[Pod, str, Path]]) -> None:
    new, new_id, target = contained()
    recorded = [{"hierarchy": hierarchy()[0], "path": "worker", "processes": [inner_pids(new.trainer)[-1]]}]
    remake(new.pid1, recorded, new_id)
    later = rejoin(new.pid1, new.root, recorded, new_id, freezer=hierarchy()[0])
    assert later == {new.trainer: str(target / "worker")}
    assert (target / "worker" / "cgroup.procs").read_text() == ""


def test_a_job_that_moved_init_too_is_measured_from_the_containers_group(
    contained: Callable[[], tuple[Pod, str, Path]],
) -> None:
    old, old_id, group = contained()
    for name, pid in (("init", old.pid1), ("worker", old.trainer)):
        (group / name).mkdir()
        cgroups.move(pid, str(group / name))
    assert [entry["path"] for entry in nested_groups(old.pid1, old.root, old_id)] == ["worker"]


def test_without_nested_groups_there_is_nothing_to_record(contained: Callable[[], tuple[Pod, str, Path]]) -> None:
    old, old_id, _ = contained()
    assert nested_groups(old.pid1, old.root, old_id) == []


@pytest.mark.parametrize("path", ["../other", "a/../../b", "/top", "", "a//b", ".", 7])
def test_a_path_that_leads_out_of_the_container_is_refused(
    path: object, contained: Callable[[], tuple[Pod, str, Path]]
) -> None:
    new, new_id, target = contained()
    with pytest.raises(Corrupt, match="names a cgroup that no container has"):
        remake(new.pid1, [{"hierarchy": hierarchy()[0], "path": path, "processes": []}], new_id)
    assert [entry for entry in target.iterdir() if entry.is_dir()] == []
