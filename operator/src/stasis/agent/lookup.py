"""Find a container's processes with nothing but /proc: no CRI socket, no code for one runtime (the agent has hostPID).

What is gone raises ProcessLookupError, as the system calls do.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from stasis.agent import proctree

KEEPER = "stasis-keeper"  # the name that init's keeper gives itself (images/init/keeper.c)


@dataclass(frozen=True)
class Root:
    """The root of a trainer's tree: with its start time (clock ticks after boot) the pid names one process for ever."""

    pid: int
    start: int

    def alive(self) -> bool:
        return proctree.start_time(self.pid) == self.start


def find_pid1(container_id: str) -> int:
    """PID 1 of a container, as the host sees it: its cgroup's path names the container and its own pid there is 1.

    Of nested PID namespaces the outermost counts; between equals (a container and one restarted in place, whose group
    is being removed) the younger.
    """
    if not container_id:
        raise ProcessLookupError("no container id given")
    mine = re.compile(rf"(?:^|[/:-]){re.escape(container_id)}(?:\.scope)?(?:/|$)", re.MULTILINE)
    found = []
    for pid in host_pids():
        if not mine.search(proctree.read(pid, pid, "cgroup")):
            continue
        inner = inner_pids(pid)
        if inner[-1:] == [1] and not proctree.dead(pid):
            found.append((len(inner), -proctree.start_time(pid), pid))
    if not found:
        raise ProcessLookupError(f"no running container has the id {container_id}")
    return min(found)[2]


def find_root(pid1: int) -> Root:
    """The root of the trainer's tree in a prepared container: the keeper, a child of init."""
    for child in children(pid1):
        if proctree.read(child, child, "comm") == KEEPER and (start := proctree.start_time(child)):
            return Root(child, start)
    raise ProcessLookupError(f"init (pid {pid1}) has no keeper among its children: no trainer runs in this container")


def host_pids() -> list[int]:
    """Every process that this PID namespace shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    return [int(child) for task in proctree.tasks(pid) for child in proctree.read(pid, task, "children").split()]


def inner_pids(pid: int) -> list[int]:
    """The process's ids from the host's PID namespace to its own; empty when it is gone."""
    found = re.search(r"^NSpid:\s+(.*)$", proctree.read(pid, pid, "status"), re.MULTILINE)
    return [int(number) for number in found[1].split()] if found else []


def inner_thread(pid: int, task: int) -> int:
    """A thread's id in its own PID namespace; 0 when it is gone."""
    found = re.search(r"^NSpid:.*?(\d+)$", proctree.read(pid, task, "status"), re.MULTILINE)
    return int(found[1]) if found else 0


def namespace(pid: int, kind: str, task: int | None = None) -> str:
    """What /proc/PID/ns/KIND names, for example `net:[4026531833]`; empty when gone or not of this kernel."""
    try:
        return os.readlink(f"/proc/{pid}/task/{task or pid}/ns/{kind}")
    except OSError:
        return ""


def neighbours(pid1: int, tree: set[int]) -> list[int]:
    """The other processes of the pod: those in its network namespace that are not in the tree (init among them)."""
    home = namespace(pid1, "net")
    return [pid for pid in host_pids() if pid not in tree and home and namespace(pid, "net") == home]
