"""Which processes of a tree hold a GPU: told by what they have open and mapped, never by a driver's answer alone."""

from __future__ import annotations

import os
import re

from stasis.agent import proctree
from stasis.agent.lookup import inner_pids
from stasis.agent.scan.snapshot import read_mappings

_GPU = re.compile(r"/dev/nvidia(\d+)(?: \(deleted\))?$")


def holders(root: int) -> dict[int, set[str]]:
    """By pid, what each process below `root` holds of /dev/nvidia*: descriptors of every thread, since threads may have
    tables of their own and a leader may have ended, and mappings."""
    found = {}
    for pid in proctree.walk(root):
        held = {mapping.path for mapping in read_mappings(pid) if _of_nvidia(mapping.path)}
        for task in proctree.tasks(pid):
            held |= _descriptors(f"/proc/{pid}/task/{task}/fd")
        if held:
            found[pid] = held
    return found


def _of_nvidia(path: str) -> bool:
    return path.startswith("/dev/nvidia")


def _descriptors(folder: str) -> set[str]:
    held = set()
    try:
        for name in os.listdir(folder):
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            if _of_nvidia(target):
                held.add(target)
    except OSError:
        pass  # the thread is gone
    return held


def minors(held: set[str]) -> set[int]:
    """Of the GPUs among what a process holds."""
    return {int(match[1]) for path in held if (match := _GPU.match(path))}


def inner(pid: int) -> int:
    """The process's id in its own PID namespace; 0: it is gone."""
    return (inner_pids(pid) or [0])[-1]
