"""Privileges, memory, disk and limits of this machine and of this process."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from stasis.doctor.check import Check, Need, setting

GIB = 1 << 30
MEMORY, DISK = 2 * GIB, 5 * GIB  # what the demo takes, with room to spare

# Number of each capability (linux/capability.h), whether nothing works without it, and what its lack means.
CAPABILITIES: dict[str, tuple[int, bool, str]] = {
    "CAP_SYS_ADMIN": (21, True, "namespaces cannot be entered and nothing can be mounted"),
    "CAP_SYS_PTRACE": (19, True, "CRIU cannot look into the processes that it dumps"),
    "CAP_NET_ADMIN": (12, True, "connections cannot be locked, dumped or restored"),
    "CAP_SYS_CHROOT": (18, True, "the files of a container cannot be entered"),
    "CAP_KILL": (5, True, "processes of other users cannot be stopped or ended"),
    "CAP_DAC_OVERRIDE": (1, True, "files of other users cannot be read and written"),
    "CAP_CHOWN": (0, True, "restored files cannot be given to their owners"),
    "CAP_FOWNER": (3, True, "times and modes of restored files cannot be set"),
    "CAP_SETUID": (7, True, "processes cannot get their users back"),
    "CAP_SETGID": (6, True, "processes cannot get their groups back"),
    "CAP_SETPCAP": (8, True, "processes cannot get their capabilities back"),
    "CAP_MKNOD": (27, True, "files that a container has deleted come back at a restore"),
    "CAP_SETFCAP": (31, False, "restored files lose their capabilities"),
    "CAP_DAC_READ_SEARCH": (2, False, "programs that watch files by inotify cannot be restored"),
    "CAP_SYS_NICE": (23, False, "processes do not get their priorities and processors back"),
    "CAP_IPC_LOCK": (14, False, "locked memory beyond the limit cannot be locked again"),
    "CAP_NET_RAW": (13, False, "raw and packet sockets cannot be restored"),
    "CAP_SYS_RESOURCE": (
        24,
        False,
        "CRIU may not ask for the limits of another user's process ('Can't get rlimit'): only trainers that run as "
        "root can be suspended; limits above this process's own cannot be restored",
    ),
}
GRANT = "grant them: a container needs `--privileged` or `--cap-add`; some sandboxes never do"


def checks(folders: dict[str, Path]) -> Iterator[Check]:
    """`folders` are those that grow, by what they are for."""
    need = Need(
        "privileges", "root", "freezing, dumping and restoring the processes of containers takes root", "run as root"
    )
    yield need.seen(os.geteuid() == 0, f"user {os.geteuid()}")
    yield from capabilities(_effective())
    yield memory((setting("/proc/meminfo") or "").splitlines())
    for what, folder in folders.items():
        yield disk(what, folder)
    yield from _pipes(_effective())
    yield _inotify()
    yield propagation((setting("/proc/self/mountinfo") or "").splitlines())


def _effective() -> int:
    status = (setting("/proc/self/status") or "").splitlines()
    return next((int(line.split()[1], 16) for line in status if line.startswith("CapEff:")), 0)


def has(effective: int, name: str) -> bool:
    return bool(effective >> CAPABILITIES[name][0] & 1)


def capabilities(effective: int) -> Iterator[Check]:
    """`effective` is the mask of /proc/self/status."""
    for name, (_, needed, meaning) in CAPABILITIES.items():
        need = Need("privileges", name, f"without it {meaning}", GRANT if os.geteuid() == 0 else "run as root", needed)
        yield need.seen(has(effective, name), "granted" if has(effective, name) else "not granted")


def memory(meminfo: list[str]) -> Check:
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in meminfo if line.endswith(" kB")}
    available = sizes.get("MemAvailable", 0)
    meaning = "a checkpoint that goes on is copied into memory first; too little, and it takes the slower way over disk"
    need = Need("resources", "memory", meaning, "free some, or add some", needed=False)
    return need.seen(available >= MEMORY, f"{_gib(available)} available of {_gib(sizes.get('MemTotal', 0))}")


def disk(what: str, folder: Path) -> Check:
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    free = shutil.disk_usage(there).free
    need = Need("resources", what, "what is built, and checkpoints, have no room", "free some space", needed=False)
    return need.seen(free >= DISK, f"{_gib(free)} free at {folder}")


def _pipes(effective: int) -> Iterator[Check]:
    largest = int(setting("/proc/sys/fs/pipe-max-size") or 0)
    meaning = "smaller pipes than 1 MiB make a dump slower"
    need = Need("resources", "fs.pipe-max-size", meaning, "sysctl fs.pipe-max-size=1048576", needed=False)
    yield need.seen(largest >= 1 << 20, f"{largest >> 10} KiB")

    soft = int(setting("/proc/sys/fs/pipe-user-pages-soft") or 0) * resource.getpagesize()
    free = has(effective, "CAP_SYS_ADMIN") or has(effective, "CAP_SYS_RESOURCE") or soft == 0
    meaning = "a suspend holds memory by reference in pipes; beyond the limit it copies instead, and is frozen longer"
    need = Need("resources", "pipe memory", meaning, "sysctl fs.pipe-user-pages-soft=0", needed=False)
    yield need.seen(free, "no limit for this process" if free else f"{soft >> 20} MiB in all")

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = int(setting("/proc/sys/fs/nr_open") or 0) if hard == resource.RLIM_INFINITY else hard
    meaning = "a suspend takes one descriptor for each MiB that it holds by reference; beyond that it copies"
    need = Need("resources", "open files", meaning, "ulimit -Hn 1048576", needed=False)
    yield need.seen(files >= 8192, f"{files}: about {files >> 10} GiB of a rank's memory")


def _inotify() -> Check:
    instances = int(setting("/proc/sys/fs/inotify/max_user_instances") or 0)
    meaning = "with too few, init sees the agent's word a quarter of a second late; programs that use it fail to start"
    remedy = "sysctl fs.inotify.max_user_instances=8192"
    return Need("resources", "inotify", meaning, remedy, needed=False).seen(instances >= 128, f"{instances} instances")


def propagation(mountinfo: list[str]) -> Check:
    """Of mounts below /: shared or private."""
    root = next((fields for line in mountinfo if (fields := line.split())[4] == "/"), [])
    shared = any(field.startswith("shared:") for field in root[6:])
    meaning = (
        "containers here get mount namespaces of their own either way; a kubelet on this machine needs them shared"
    )
    need = Need("resources", "mount propagation", meaning, "")
    return need.seen(True, "shared" if shared else "private (for a kubelet: mount --make-rshared /)")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
