"""What CRIU loses of a task (tried with 4.2.1): CPU affinity, I/O priority, timer slack, core dump filter.

Nice values, scheduling policies, umask, oom_score_adj and the rest it carries. Recorded is only what differs from
init's own, so that a task that may run everywhere may do so on a machine with other CPUs too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from stasis.agent import proctree
from stasis.agent.lookup import inner_thread

_LIBC = ctypes.CDLL(None, use_errno=True)
_IOPRIO_SET, _IOPRIO_GET = (30, 31) if platform.machine() == "aarch64" else (251, 252)
_WHO_PROCESS = 1
# Files that the whole process shares, and the largest value of each: what is written comes from a checkpoint.
_FILES = {"timerslack_ns": (10, (1 << 63) - 1), "coredump_filter": (16, 0xFFFF)}


def attributes(pid1: int, root: int) -> list[dict[str, Any]]:
    """One entry for each thread of the tree that has something of its own:

    `thread` (its id inside the container); `affinity` (CPU numbers) with `allowed` (init's), `io_priority` (as
    ioprio_get(2) has it), `timerslack_ns`, `coredump_filter`. JSON as it is.
    """
    usual = _read(pid1, pid1)
    found = []
    for pid in proctree.walk(root):
        for task in proctree.tasks(pid):
            with contextlib.suppress(OSError):
                own = {name: value for name, value in _read(pid, task).items() if value != usual[name]}
                if own and (inner := inner_thread(pid, task)):
                    if "affinity" in own:
                        own["allowed"] = usual["affinity"]
                    found.append({"thread": inner, **own})
    return found


def reapply(pid1: int, root: int, recorded: Iterable[Mapping[str, Any]]) -> list[str]:
    """Give the restored tree its attributes back; what this container does not allow, in words.

    Where the container may use other CPUs than the old one, the place in the list counts: a task pinned to the second
    of its CPUs is pinned to the second again.
    """
    threads = {inner_thread(pid, task): (pid, task) for pid in proctree.walk(root) for task in proctree.tasks(pid)}
    allowed = sorted(os.sched_getaffinity(pid1))
    notes = []
    for entry in recorded:
        if entry.get("thread") not in threads:
            continue
        pid, task = threads[entry["thread"]]
        name = f"thread {entry['thread']} ({proctree.read(pid, task, 'comm')})"
        try:
            if "affinity" in entry:
                cpus = _cpus(entry["affinity"], entry.get("allowed", []), allowed)
                if cpus:
                    os.sched_setaffinity(task, cpus)
                else:
                    notes.append(f"{name} was pinned to CPUs {entry['affinity']}, this container has {allowed}")
            if "io_priority" in entry:
                _checked(_LIBC.syscall(_IOPRIO_SET, _WHO_PROCESS, task, int(entry["io_priority"])))
            for file, (base, largest) in _FILES.items():
                if file in entry and 0 <= int(entry[file]) <= largest:
                    with open(f"/proc/{task}/{file}", "w") as out:
                        out.write(f"{int(entry[file]):#x}" if base == 16 else str(int(entry[file])))
        except (OSError, ValueError, TypeError) as error:
            notes.append(f"{name} could not get its scheduling attributes back: {error}")
    return notes


def _read(pid: int, task: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "affinity": sorted(os.sched_getaffinity(task)),
        "io_priority": _checked(_LIBC.syscall(_IOPRIO_GET, _WHO_PROCESS, task)),
    }
    for file, (base, _) in _FILES.items():
        with open(f"/proc/{task}/{file}") as lines:
            values[file] = int(lines.read().strip() or "0", base)
    return values


def _cpus(wanted: list[int], old: list[int], new: list[int]) -> list[int]:
    if old != new and len(old) <= len(new) and set(wanted) <= set(old):
        return [new[old.index(cpu)] for cpu in wanted]
    return sorted(set(wanted) & set(new))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
