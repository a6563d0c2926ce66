"""Where the hierarchies of control groups are mounted, and in which group of each a process is.

Works with cgroup v1, v2 and both at once (hybrid). A hierarchy goes by the name that /proc/PID/cgroup gives one of its
controllers ("freezer", "name=systemd"); the unified one of v2 by "". Standard library only: the guardian imports it.
"""

import contextlib
import os
import re

# The hierarchies by which managers of services and containers end what belongs together; the others only set limits.
LIFETIMES = ("", "name=systemd", "freezer", "devices", "pids")

MOUNTINFO = re.compile(r"^\S+ \S+ \S+ (?P<root>\S+) (?P<at>\S+) .* - (?P<type>cgroup2?) \S+ (?P<options>\S+)$")


def hierarchies() -> dict[str, str]:
    """Name -> mount point of every hierarchy that is mounted whole; of several mounts of one, the first."""
    found: dict[str, str] = {}
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            mount = MOUNTINFO.match(line)
            if mount is None or mount["root"] != "/":
                continue
            names = [""] if mount["type"] == "cgroup2" else mount["options"].split(",")
            for name in names:
                found.setdefault(name, mount["at"])
    return found


def membership(pid: int | str) -> dict[str, str]:
    """Name -> path of the group that the process is in, from each hierarchy's root. ProcessLookupError: it is gone."""
    groups: dict[str, str] = {}
    try:
        with open(f"/proc/{pid}/cgroup") as lines:
            for line in lines:
                _, names, path = line.rstrip("\n").split(":", 2)
                groups.update(dict.fromkeys(names.split(","), path.removesuffix(" (deleted)")))
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"no process {pid}") from gone
    return groups


def folders(pid: int) -> list[str]:
    """The folders of the groups that the process is in, one of each hierarchy that is mounted."""
    mounts = hierarchies()
    groups = membership(pid).items()
    return sorted({(mounts[name] + path).rstrip("/") for name, path in groups if name in mounts})


def move(pid: int, group: str) -> None:
    """Put a process, all threads, into a group (a folder). ProcessLookupError: it is gone; OSError: not allowed."""
    fd = os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(pid).encode())
    finally:
        os.close(fd)


def move_all(groups: dict[int, str]) -> None:
    """Put processes into groups, by pid; what is gone is left out. Empties `groups`."""
    while groups:
        pid, group = groups.popitem()
        with contextlib.suppress(OSError):
            move(pid, group)


def outlive(name: str) -> None:
    """Move this process where the end of its starter's groups does not reach it: to the group `name` at the top of
    each hierarchy that ends processes, to the top of the others, whose groups could not be removed for as long as it
    lives: a container would not end. Raises OSError."""
    mounts = hierarchies()
    for hierarchy, group in membership("self").items():
        if hierarchy in mounts and group != "/":
            place = f"{mounts[hierarchy]}/{name}" if hierarchy in LIFETIMES else mounts[hierarchy]
            os.makedirs(place, exist_ok=True)
            move(os.getpid(), place)
