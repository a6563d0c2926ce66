"""A container is found by its id alone, its tree by the keeper's name; an identity outlives no process."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.preflight.conftest import Pod

from stasis.agent import cgroups
from stasis.agent.lookup import Root, children, find_pid1, find_root
from stasis.agent.proctree import start_time

pytestmark = pytest.mark.root


@pytest.fixture
def group() -> Iterator[Callable[[str], Path]]:
    """group(NAME): a cgroup of the hierarchy that processes are listed in, removed at the end."""
    mounts = cgroups.hierarchies()
    top = Path(mounts.get("name=systemd") or mounts.get("freezer") or mounts[""])
    made: list[Path] = []

    def make(name: str) -> Path:
        for folder in reversed([top / name, *(top / name).parents]):
            if folder.is_relative_to(top) and not folder.exists():
                folder.mkdir()
                made.append(folder)
        return top / name

    yield make
    for folder in reversed(made):
        for pid in (folder / "cgroup.procs").read_text().split():
            cgroups.move(int(pid), str(top))
        folder.rmdir()


@pytest.mark.parametrize(
    "form", ["{}", "kubepods/pod1/{}", "kubepods.slice/cri-containerd-{}.scope", "a/crio-{}/nested"]
)
def test_pid1_is_found_by_the_containers_id_in_its_cgroup(
    form: str, pod: Callable[[str], Pod], group: Callable[[str], Path]
) -> None:
    container, other = pod("ready()"), pod("ready()")
    name = uuid.uuid4().hex
    for one, its in ((container, name), (other, name + "0")):  # an id that begins like the other
        for pid in (one.pid1, one.root.pid, one.trainer):
            cgroups.move(pid, str(group(form.format(its))))

    assert find_pid1(name) == container.pid1
    assert find_pid1(name + "0") == other.pid1


def test_of_nested_containers_the_outer_one_is_found(pod: Callable[[str], Pod], group: Callable[[str], Path]) -> None:
    container = pod(
        """
        call(libc.unshare(0x20000000))
        if os.fork() == 0:
            ready()
        os.wait()
        """
    )
    name = uuid.uuid4().hex
    (nested,) = children(container.trainer)
    for pid in (nested, container.trainer, container.pid1):
        cgroups.move(pid, str(group(name)))
    assert find_pid1(name) == container.pid1


def test_no_such_container() -> None:
    with pytest.raises(ProcessLookupError, match="no running container has the id 4711abc"):
        find_pid1("4711abc")
    with pytest.raises(ProcessLookupError):
        find_pid1("")


def test_the_root_is_the_keeper(pod: Callable[[str], Pod]) -> None:
    container = pod("ready()")
    root = find_root(container.pid1)
    assert children(root.pid) == [container.trainer]
    assert root.alive()
    assert not Root(root.pid, root.start + 1).alive()


def test_without_a_keeper_there_is_no_root() -> None:
    with pytest.raises(ProcessLookupError, match="no keeper"):
        find_root(os.getpid())


def test_a_root_that_has_ended_is_not_alive() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        root = Root(process.pid, start_time(process.pid))
        assert root.alive()
        process.kill()
        process.wait()
        assert not root.alive()
