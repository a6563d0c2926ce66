"""System V IPC and POSIX message queues: objects of the IPC namespace that no process owns, so that no dump has them.

An attached shared memory segment makes CRIU fail; semaphores, detached segments and queues are lost without a word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from stasis.agent import namespaces
from stasis.agent.files.beneath import IN_ROOT, NO_MAGICLINKS, NO_SYMLINKS, opened
from stasis.agent.files.mounts import mounts
from stasis.agent.scan.observation import Observation
from stasis.agent.scan.snapshot import Tree
from stasis.errors import Finding

_KINDS = {"shm": "shared memory segment", "sem": "semaphore set", "msg": "message queue"}
_IDS = {"shm": ("shmid", "--shmem-id"), "sem": ("semid", "--semaphore-id"), "msg": ("msqid", "--queue-id")}


def observe(tree: Tree) -> Iterator[Observation]:
    for kind, rows in sysvipc(tree.pid1).items():
        column, option = _IDS[kind]
        for row in rows:
            yield _observed(
                tree,
                f"/proc/sysvipc/{kind}: key {int(row['key']) & 0xFFFFFFFF:#x}, id {row[column]}",
                int(row.get("cpid", row.get("lspid", "0"))),
                f"a System V {_KINDS[kind]} exists, which a checkpoint would lose",
                "use POSIX shared memory and semaphores instead (MPI, NCCL: a transport of another kind), or remove it "
                f"where it is left over (ipcrm {option} {row[column]})",
            )
    for path in message_queues(tree.pid1):
        yield _observed(
            tree,
            path,
            0,
            "a POSIX message queue exists, which a checkpoint would lose",
            "use a pipe or a socket instead, or remove it (mq_unlink) when it is left over",
        )


def _observed(tree: Tree, where: str, creator: int, cause: str, remedy: str) -> Observation:
    """`creator`: the object outlives it, so it may be of no process any more, or 0 where the kernel does not tell."""
    process = tree.by_pid.get(creator)
    if process:
        return Observation.of(process, where, cause, remedy)
    return Observation(Finding(cause, remedy, where=where))


def sysvipc(pid: int) -> dict[str, list[dict[str, str]]]:
    """The rows of /proc/sysvipc/{shm,sem,msg} in the IPC namespace of `pid`, by column.

    These files show the namespace of the thread that opens them.
    """
    try:
        namespace = os.open(f"/proc/{pid}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"process {pid} is gone") from gone
    try:
        return namespaces.call(namespace, lambda: {kind: _rows(f"/proc/sysvipc/{kind}") for kind in _KINDS})
    finally:
        os.close(namespace)


def _rows(path: str) -> list[dict[str, str]]:
    with open(path) as file:
        names, *rows = [line.split() for line in file]
    return [dict(zip(names, row, strict=False)) for row in rows]


def message_queues(pid: int) -> list[str]:
    """Names of queues in the mounts of type mqueue that the process has, as paths of the container."""
    found = []
    with opened_root(pid) as root:
        for mount in mounts(pid):
            if mount.kind == "mqueue":
                flags, resolve = os.O_RDONLY | os.O_DIRECTORY, IN_ROOT | NO_MAGICLINKS | NO_SYMLINKS
                with contextlib.suppress(OSError), opened(root, mount.point, flags, resolve=resolve) as folder:
                    found += [f"{mount.point}/{name}" for name in os.listdir(folder)]
    return found


@contextlib.contextmanager
def opened_root(pid: int) -> Iterator[int]:
    try:
        fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"process {pid} is gone") from gone
    try:
        yield fd
    finally:
        os.close(fd)
