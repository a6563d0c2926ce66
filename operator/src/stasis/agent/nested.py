"""Control groups that a job has made below its container's (Ray, nested runtimes): CRIU is told to leave groups alone
(`--manage-cgroups=ignore`), so they are made again in the new container and their processes moved there.

Never outside the container's own group: what is read back is another party's, so every path is checked.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stasis.agent import cgroups, proctree
from stasis.agent.lookup import Root, inner_pids
from stasis.errors import Corrupt

# What a group may be told, of v1 and v2; carried where it can be written in the new one.
LIMITS = (
    "cpuset.cpus", "cpuset.mems", "memory.limit_in_bytes", "memory.soft_limit_in_bytes", "memory.swappiness",
    "cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us", "pids.max", "memory.max", "memory.high", "memory.low",
    "memory.min", "cpu.max", "cpu.weight", "io.weight",
)  # fmt: skip
_DEPTH, _LENGTH = 32, 4096


def nested_groups(pid1: int, root: Root, container_id: str = "") -> list[dict[str, Any]]:
    """The groups below the container's that processes of the tree are in. To be read while they are there: before the
    freezer gathers the tree.

    One entry for each: `hierarchy` (as `cgroups.hierarchies` names it), `path` (from the container's group),
    `processes` (their pids inside the container), `limits` (file -> text). JSON as it is.
    """
    mounts, bases = cgroups.hierarchies(), _bases(pid1, container_id)
    usual = cgroups.membership(root.pid)
    found: dict[str, dict[str, Any]] = {}  # by folder: one hierarchy may have several names
    for pid in proctree.walk(root.pid):
        inner = inner_pids(pid)
        with contextlib.suppress(ProcessLookupError):
            for name, path in cgroups.membership(pid).items():
                below = f"{bases[name].rstrip('/')}/"
                if name not in mounts or path == usual[name] or not path.startswith(below) or not inner:
                    continue
                folder = mounts[name] + path
                entry = found.setdefault(
                    folder,
                    {"hierarchy": name, "path": path.removeprefix(below), "processes": [], "limits": _limits(folder)},
                )
                if inner[-1] not in entry["processes"]:
                    entry["processes"].append(inner[-1])
    return list(found.values())


def remake(pid1: int, groups: Iterable[Mapping[str, Any]], container_id: str = "") -> None:
    """Make the groups in the new container, before the restore: files of theirs may be open."""
    for folder, entry in _folders(pid1, groups, container_id):
        made = folder
        while not os.path.isdir(made):
            made = os.path.dirname(made)
        for name in os.path.relpath(folder, made).split("/") if made != folder else []:
            made = f"{made}/{name}"
            os.mkdir(made)
            for file in ("cpuset.cpus", "cpuset.mems"):  # empty at first in v1, and no process may enter then
                with contextlib.suppress(OSError):
                    _write(f"{made}/{file}", _text(f"{os.path.dirname(made)}/{file}"))
        for file, text in entry.get("limits", {}).items():
            if file in LIMITS and isinstance(text, str) and len(text) <= _LENGTH:
                with contextlib.suppress(OSError):  # a limit that this machine does not know, or other CPUs
                    _write(f"{folder}/{file}", text)


def rejoin(
    pid1: int, root: Root, groups: Iterable[Mapping[str, Any]], container_id: str = "", *, freezer: str = ""
) -> dict[int, str]:
    """Move the restored processes into their groups.

    In the hierarchy `freezer`, where the tree is frozen in a group of its own, moving would thaw them: what has to be
    done there after the thaw is returned, as pid -> folder.
    """
    here = {inner[-1]: pid for pid in proctree.walk(root.pid) if (inner := inner_pids(pid))}
    mounts = cgroups.hierarchies()
    later: dict[int, str] = {}
    for folder, entry in _folders(pid1, groups, container_id):
        for inner in entry.get("processes", []):
            if inner not in here:
                continue
            if mounts[entry["hierarchy"]] == mounts.get(freezer):
                later[here[inner]] = folder
            else:
                cgroups.move(here[inner], folder)
    return later


def _folders(
    pid1: int, groups: Iterable[Mapping[str, Any]], container_id: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each group is on this machine; what this machine has no hierarchy for is left out."""
    mounts, bases = cgroups.hierarchies(), _bases(pid1, container_id)
    for entry in groups:
        path, name = entry.get("path"), entry.get("hierarchy")
        parts = path.split("/") if isinstance(path, str) else []
        if not parts or len(parts) > _DEPTH or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise Corrupt(f"a checkpoint names a cgroup that no container has: {path!r}")
        if name in mounts and name in bases:
            yield f"{mounts[name]}{bases[name].rstrip('/')}/{path}", entry


def _bases(pid1: int, container_id: str) -> dict[str, str]:
    """The container's own group in each hierarchy: the part of the path that names it, since its PID 1 may have been
    moved further down by the program; without an id PID 1's group."""
    groups = cgroups.membership(pid1)
    if container_id:
        own = re.compile(rf"^.*?{re.escape(container_id)}[^/]*")
        groups = {name: (found[0] if (found := own.match(path)) else path) for name, path in groups.items()}
    return groups


def _limits(folder: str) -> dict[str, str]:
    return {file: text for file in LIMITS if (text := _text(f"{folder}/{file}"))}


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
