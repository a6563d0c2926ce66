"""What a node and a container have free: memory, disk, descriptors, pipes, threads, huge pages."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

from stasis.agent import cgroups, proctree
from stasis.core.capacity import MIB, Amounts, ContainerRoom

MARGIN = 128 * MIB  # of memory, left for everybody else: kubelet evicts at 100 MiB by default
DISK_KEPT = 0.10  # of a disk, kubelet's default threshold of eviction (nodefs.available)
UNLIMITED = 1 << 62
_PRIVILEGED = 1 << 24 | 1 << 21  # CAP_SYS_RESOURCE, CAP_SYS_ADMIN: no limit of pipes (fs/pipe.c)
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")


def node_room(folder: Path) -> Amounts:
    """Free for this agent; `folder`: on the disk that captures and packs go to. Reservations are not counted here."""
    space = os.statvfs(folder)
    disk = int(space.f_bavail * space.f_frsize - DISK_KEPT * space.f_blocks * space.f_frsize)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    return Amounts(
        memory=max(0, min(_available(), memory_left(os.getpid(), reclaimable=True)) - MARGIN),
        disk=max(0, disk),
        descriptors=max(0, (UNLIMITED if hard == resource.RLIM_INFINITY else hard) - opened),
        pipe_pages=_pipe_pages(),
    )


def unlinked_file(folder: Path, size: int) -> int | None:
    """A new file of mode 0600 without a name that takes so many bytes of the disk already; None where those are not
    free. OSError where the file system knows no such files."""
    if size > node_room(folder).disk:
        return None
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, max(size, 1))
    except OSError as error:
        os.close(fd)
        if error.errno != errno.ENOSPC:
            raise
        return None
    return fd


def container_room(pid1: int) -> ContainerRoom:
    """What the container of `pid1` gives a tree that is restored into it."""
    memory, threads = memory_left(pid1, reclaimable=True), _threads_left(pid1)
    return ContainerRoom(
        memory=None if memory >= UNLIMITED else memory,
        threads=None if threads >= UNLIMITED else threads,
        huge_pages=huge_pages_free(),
        available=max(0, _available() - MARGIN),
    )


def memory_left(pid: int, *, reclaimable: bool) -> int:
    """Bytes below the tightest memory limit among the process's group and those above it; UNLIMITED without one.

    `reclaimable`: file cache that can be dropped counts as free.
    """
    left = UNLIMITED
    for name, limit, usage, cache in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("", "memory.max", "memory.current", "inactive_file"),
    ):
        for folder in _groups(pid, name):
            bound = _number(folder / limit)
            if bound is not None and bound < UNLIMITED:
                used = _number(folder / usage) or 0
                free = _stat(folder / "memory.stat", cache) if reclaimable else 0
                left = min(left, max(0, bound - used + free))
    return left


def huge_pages_free() -> dict[int, int]:
    """Size of a page in bytes -> free pages of the node."""
    found = {}
    for pool in _HUGE_PAGES.glob("hugepages-*kB") if _HUGE_PAGES.is_dir() else []:
        size = int(pool.name.removeprefix("hugepages-").removesuffix("kB")) << 10
        free, promised = _number(pool / "free_hugepages"), _number(pool / "resv_hugepages")
        found[size] = max(0, (free or 0) - (promised or 0))
    return found


def _threads_left(pid: int) -> int:
    left = UNLIMITED
    for name in ("pids", ""):
        for folder in _groups(pid, name):
            bound = _number(folder / "pids.max")
            if bound is not None:
                left = min(left, max(0, bound - (_number(folder / "pids.current") or 0)))
    return left


def _groups(pid: int, hierarchy: str) -> list[Path]:
    """The process's group in a hierarchy and all above it, as folders."""
    mount, path = cgroups.hierarchies().get(hierarchy), cgroups.membership(pid).get(hierarchy)
    if mount is None or path is None:
        return []
    folder = Path(mount + path)
    return [folder, *(above for above in folder.parents if above.is_relative_to(mount))]


def _number(path: Path) -> int | None:
    """None: no such file, or "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _available() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _pipe_pages() -> int:
    soft = _number(Path("/proc/sys/fs/pipe-user-pages-soft")) or 0
    found = re.search(r"^CapEff:\s+(\w+)$", proctree.read(os.getpid(), os.getpid(), "status"), re.MULTILINE)
    privileged = bool(found and int(found[1], 16) & _PRIVILEGED)
    return UNLIMITED if privileged or soft == 0 else soft
