"""What CRIU loses of a task is recorded, and given back to the task of the same number in another container."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest
from tests.preflight.conftest import Pod

from stasis.agent.attributes import attributes, reapply
from stasis.agent.lookup import inner_pids
from stasis.agent.proctree import tasks

pytestmark = pytest.mark.root
_LIBC = ctypes.CDLL(None)

PROGRAM = """
def run():
    {thread}
    go.set()
    signal.pause()
go = threading.Event()
threading.Thread(target=run, daemon=True).start()
go.wait()
{process}
ready()
os._exit(0)
"""
OWN = PROGRAM.format(
    thread="os.sched_setaffinity(0, {1}); libc.syscall(251, 1, 0, (2 << 13) | 3)",
    process='libc.prctl(29, 123456, 0, 0, 0); open("/proc/self/coredump_filter", "w").write("0x7f")',
)
PLAIN = PROGRAM.format(thread="pass", process="pass")


def test_attributes_survive(pod: Callable[[str], Pod]) -> None:
    old, new = pod(OWN), pod(PLAIN)
    assert inner_pids(old.trainer)[-1] == inner_pids(new.trainer)[-1]  # as after a restore

    recorded = attributes(old.pid1, old.root.pid)
    assert attributes(new.pid1, new.root.pid) == []
    assert reapply(new.pid1, new.root.pid, recorded) == []

    assert attributes(new.pid1, new.root.pid) == recorded
    thread = max(tasks(new.trainer))
    assert os.sched_getaffinity(thread) == {1}
    assert _LIBC.syscall(252, 1, thread) == (2 << 13) | 3
    assert os.sched_getaffinity(new.trainer) == os.sched_getaffinity(new.pid1)
    with open(f"/proc/{new.trainer}/timerslack_ns") as slack, open(f"/proc/{new.trainer}/coredump_filter") as cores:
        assert (slack.read(), cores.read()) == ("123456\n", "0000007f\n")


def test_with_other_cpus_the_place_in_the_list_counts(pod: Callable[[str], Pod]) -> None:
    container = pod(PLAIN)
    thread = inner_pids(container.trainer)[-1]
    pinned = {"thread": thread, "affinity": [5], "allowed": [4, 5]}
    assert reapply(container.pid1, container.root.pid, [pinned]) == []
    assert os.sched_getaffinity(container.trainer) == {1}


def test_what_the_container_does_not_have_is_said(pod: Callable[[str], Pod]) -> None:
    container = pod(PLAIN)
    thread = inner_pids(container.trainer)[-1]
    pinned = {"thread": thread, "affinity": [70], "allowed": list(range(64, 80))}
    (note,) = reapply(container.pid1, container.root.pid, [pinned])
    assert f"thread {thread} (python" in note
    assert "pinned to CPUs [70], this container has [0, 1]" in note


@pytest.mark.parametrize("bad", [{"affinity": ["x"]}, {"io_priority": "x"}, {"timerslack_ns": -1}, {"affinity": 3}])
def test_a_record_of_another_party_does_no_harm(bad: dict[str, object], pod: Callable[[str], Pod]) -> None:
    container = pod(PLAIN)
    thread = inner_pids(container.trainer)[-1]
    reapply(container.pid1, container.root.pid, [{"thread": 4711}, {"thread": thread, **bad}])
    assert attributes(container.pid1, container.root.pid) == []
