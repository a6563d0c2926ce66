"""A process tree as /proc shows it. What is gone reads as empty: a process may end at any time."""

from __future__ import annotations

import os
from collections.abc import Iterator


def walk(root: int) -> Iterator[int]:
    """`root` and its descendants, parents first; nothing where the root is gone. Each is looked for when asked for."""
    if not os.path.exists(f"/proc/{root}"):
        return
    found = [root]
    for pid in found:
        yield pid
        for task in tasks(pid):
            found.extend(int(child) for child in reversed(read(pid, task, "children").split()))


def tasks(pid: int) -> list[int]:
    """The threads of a process by their ids, its leader among them."""
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def dead(pid: int) -> bool:
    """Gone, or a zombie without living threads: nothing there to freeze."""
    return all(state(pid, task) in "ZX" for task in tasks(pid))


def state(pid: int, task: int) -> str:
    """The thread's state letter of proc(5); X for one that is gone."""
    rest = read(pid, task, "stat").rpartition(")")[2].split()
    return rest[0] if rest else "X"


def process_of(task: int) -> int:
    """The process that a thread belongs to; 0: gone."""
    return _status(task, task, "Tgid:")


def tracer(pid: int, task: int) -> int:
    """The process that traces the thread; 0: none."""
    return _status(pid, task, "TracerPid:")


def bounding(pid: int) -> int:
    """The capabilities that a process may come to have, as a mask; 0: it is gone."""
    return _status(pid, pid, "CapBnd:", base=16)


def start_time(pid: int) -> int:
    """Clock ticks after boot at which the process started: with the pid it names one process until the next boot.
    0: it is gone."""
    rest = read(pid, pid, "stat").rpartition(")")[2].split()
    return int(rest[19]) if rest else 0


def read(pid: int, task: int, name: str) -> str:
    """The text of /proc/PID/task/TASK/NAME, stripped."""
    try:
        with open(f"/proc/{pid}/task/{task}/{name}", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _status(pid: int, task: int, field: str, base: int = 10) -> int:
    for line in read(pid, task, "status").splitlines():
        if line.startswith(field):
            return int(line.split()[1], base)
    return 0
