"""Descriptors that cannot be carried: kernel objects, devices, files that the container does not have, pipes that lead
out of the tree. Sockets: sockets.py."""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
from collections.abc import Iterator
from itertools import chain

from stasis.agent import proctree
from stasis.agent.lookup import host_pids, inner_pids, neighbours
from stasis.agent.scan import kcmp
from stasis.agent.scan.borrow import borrowed
from stasis.agent.scan.mounts import Mounts
from stasis.agent.scan.observation import SOON, Observation
from stasis.agent.scan.snapshot import Descriptor, Process, Tree, read_descriptors
from stasis.core import carriable

_THREAD_PIDFD = os.O_EXCL
_PTS = range(136, 144)
_STDIO_REMEDY = "let the container's stdout and stderr be pipes, as container runtimes make them"


def observe(tree: Tree) -> Iterator[Observation]:
    mounts = Mounts.of(tree.pid1)
    stdio = {descriptor.target for descriptor in read_descriptors(tree.pid1)}
    masters = _terminal_masters(tree)
    for process, descriptor in tree.descriptors():
        target = descriptor.target
        if target.startswith("socket:["):
            continue
        if target.startswith("anon_inode:"):
            yield from _kernel_object(tree, process, descriptor)
        elif target.startswith("pipe:["):
            if descriptor.flags & os.O_DIRECT:
                yield Observation.of(
                    process,
                    descriptor.where,
                    "a packet pipe (O_DIRECT) cannot be checkpointed",
                    "make the pipe without O_DIRECT, or use a UNIX socket of type SOCK_SEQPACKET",
                )
        elif target.startswith("/"):
            yield from _path(tree, process, descriptor, mounts)
            if descriptor.mode in (stat.S_IFCHR, stat.S_IFBLK) and not tree.saved(target):
                yield from _device(process, descriptor, masters)
    yield from _eventpolls(tree)
    yield from _half_pipes(tree, stdio)
    yield from _fifos(tree)


def _kernel_object(tree: Tree, process: Process, descriptor: Descriptor) -> Iterator[Observation]:
    name = descriptor.target.removeprefix("anon_inode:")
    if refusal := carriable.anon_inode(name):
        yield Observation.refused(process, descriptor.where, refusal)
    elif name == "[pidfd]":
        yield from _pidfd(tree, process, descriptor)


def _pidfd(tree: Tree, process: Process, descriptor: Descriptor) -> Iterator[Observation]:
    pid = int(descriptor.info.get("Pid", "-1"))
    if descriptor.flags & _THREAD_PIDFD:
        yield Observation.of(
            process, descriptor.where, "a pidfd of a thread cannot be checkpointed", "use a pidfd of the process"
        )
    elif pid != -1 and not _in_tree(tree, pid):
        who = f"process {pid} ({proctree.read(pid, pid, 'comm')})" if pid else "a process of another PID namespace"
        yield Observation.of(
            process,
            descriptor.where,
            f"a pidfd of {who}, which is not in the job's tree, cannot be checkpointed",
            "watch only processes of the job",
            settles=SOON,
        )


def _in_tree(tree: Tree, pid: int) -> bool:
    """Also for a process that started after the tree was read."""
    while pid > 1 and pid not in tree.pids:
        fields = proctree.read(pid, pid, "stat").rpartition(")")[2].split()
        pid = int(fields[1]) if fields else 0
    return pid in tree.pids


def _eventpolls(tree: Tree) -> Iterator[Observation]:
    """CRIU dumps an epoll set with the first process that has it, and finds what it watches among that process's
    descriptors. A file that this process has closed, while another keeps it open, stays in the set and is not found."""
    seen: list[Descriptor] = []
    for process, epoll in tree.descriptors():
        if epoll.target != "anon_inode:[eventpoll]":
            continue
        if any(kcmp.same_file(epoll.pid, epoll.fd, other.pid, other.fd) for other in seen):
            continue
        seen.append(epoll)
        fds = [descriptor.fd for descriptor in process.descriptors]
        for number, offset in _watched(epoll):  # nearly always of the number that it was added by; else of a copy
            if not any(kcmp.watches(epoll.pid, epoll.fd, number, offset, fd) for fd in chain([number], fds)):
                yield Observation.of(
                    process,
                    epoll.where,
                    f"this epoll set still watches descriptor {number}, which this process has closed and another "
                    "keeps open",
                    "take a descriptor out of the epoll set (EPOLL_CTL_DEL) before it is closed",
                    settles=SOON,
                )


def _watched(epoll: Descriptor) -> list[tuple[int, int]]:
    """Descriptor numbers in the set, each with its place among equal numbers."""
    counts: dict[int, int] = {}
    watched = []
    with contextlib.suppress(OSError), open(f"/proc/{epoll.pid}/fdinfo/{epoll.fd}") as lines:
        for number in (int(line.split()[1]) for line in lines if line.startswith("tfd:")):
            watched.append((number, counts.get(number, 0)))
            counts[number] = counts.get(number, 0) + 1
    return watched


def _device(process: Process, descriptor: Descriptor, masters: set[int]) -> Iterator[Observation]:
    assert descriptor.status
    major, minor = os.major(descriptor.status.st_rdev), os.minor(descriptor.status.st_rdev)
    block = descriptor.mode == stat.S_IFBLK
    if refusal := carriable.device(descriptor.target, block, major, minor, mapped=False):
        yield Observation.refused(process, descriptor.where, refusal)
    elif not block and major in _PTS and minor + 256 * (major - _PTS.start) not in masters:
        yield Observation.of(
            process,
            descriptor.where,
            "the other side of this terminal is outside the job's tree",
            "run the container without a terminal (tty: false)",
        )


def _terminal_masters(tree: Tree) -> set[int]:
    """The indexes of the pseudo terminals whose master side the tree holds."""
    return {
        int(descriptor.info["tty-index"])
        for _, descriptor in tree.descriptors()
        if descriptor.target.endswith("/ptmx") and "tty-index" in descriptor.info
    }


def _path(tree: Tree, process: Process, descriptor: Descriptor, mounts: Mounts) -> Iterator[Observation]:
    target = descriptor.target
    number = int(descriptor.info.get("mnt_id", "-1"))
    mount = mounts.by_id.get(number)
    if refusal := carriable.mapping(target):
        yield Observation.refused(process, descriptor.where, refusal)
    elif number == -1 or target.startswith("/memfd:"):
        return
    elif mount is None and mounts.is_message_queue(descriptor.path):
        yield Observation.of(
            process,
            descriptor.where,
            "POSIX message queues cannot be checkpointed",
            "use a pipe or a socket (multiprocessing.Queue uses a pipe)",
        )
    elif mount is None:
        yield Observation.of(
            process,
            descriptor.where,
            "this file lies outside the container, so it cannot be opened again after a restore",
            _STDIO_REMEDY if descriptor.fd < 3 else "open only files that the container itself has",
        )
    elif mounts.hidden(mount):
        yield Observation.of(
            process,
            descriptor.where,
            f"this file lies below {mount.point}, over which something else was mounted since",
            "mount before the file is opened, or close it",
        )
    elif mount.kind == "proc" and (found := re.match(r"/(\d+)(?:/|$)", target[len(mount.point.rstrip("/")) :])):
        yield from _proc_of_other(tree, process, descriptor, int(found[1]))


def _proc_of_other(tree: Tree, process: Process, descriptor: Descriptor, inner: int) -> Iterator[Observation]:
    if inner == 1 or any(other.inner == inner for other in tree.processes):
        return
    for pid in neighbours(tree.pid1, tree.pids):  # a dead one's folder is carried: CRIU makes a stand-in
        if inner_pids(pid)[-1:] == [inner] and not _in_tree(tree, pid):
            yield Observation.of(
                process,
                descriptor.where,
                f"this describes process {pid} ({proctree.read(pid, pid, 'comm')}), which is not in the job's tree and "
                "will not exist after a restore",
                "open files of /proc only while they are read, or of the job's own processes",
                settles=SOON,
            )
            return


def _half_pipes(tree: Tree, stdio: set[str]) -> Iterator[Observation]:
    """A pipe of which the tree has one end only: the other is closed (which is carried), or somebody else's (which
    would be lost without a word). The container's own stdout and stderr are given to the new container's."""
    ends: dict[str, tuple[Process, Descriptor, set[bool]]] = {}
    for process, descriptor in tree.descriptors():
        if descriptor.target.startswith("pipe:[") and descriptor.target not in stdio:
            mode = descriptor.flags & os.O_ACCMODE
            _, _, writes = ends.setdefault(descriptor.target, (process, descriptor, set()))
            writes |= {True, False} if mode == os.O_RDWR else {mode == os.O_WRONLY}
    for target, (process, descriptor, writes) in ends.items():
        if len(writes) == 1 and _other_end_open(descriptor):
            who = _holder(tree, target)
            yield Observation.of(
                process,
                descriptor.where,
                f"the other end of this pipe belongs to {who} outside the job's tree",
                "connect the job only to processes that it has started itself",
                settles=SOON,
            )


def _other_end_open(descriptor: Descriptor) -> bool:
    """By poll(2) on a copy that lives for a moment: POLLERR and POLLHUP say that the other end is closed."""
    with contextlib.suppress(OSError), borrowed(descriptor) as fd:
        poll = select.poll()
        poll.register(fd, 0)
        return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    return False


def _holder(tree: Tree, target: str) -> str:
    for pid in host_pids():
        if pid not in tree.pids and any(descriptor.target == target for descriptor in read_descriptors(pid)):
            return f"process {pid} ({proctree.read(pid, pid, 'comm')})"
    return "a process"


def _fifos(tree: Tree) -> Iterator[Observation]:
    """A FIFO on a volume of the pod that another container has open."""
    ours = {
        (descriptor.status.st_dev, descriptor.status.st_ino): (process, descriptor)
        for process, descriptor in tree.descriptors()
        if descriptor.target.startswith("/") and descriptor.mode == stat.S_IFIFO and descriptor.status
    }
    for pid in neighbours(tree.pid1, tree.pids) if ours else []:
        for other in read_descriptors(pid):
            if other.target.startswith("/") and other.mode == stat.S_IFIFO and other.status:
                pair = ours.pop((other.status.st_dev, other.status.st_ino), None)
                if pair:
                    yield Observation.of(
                        pair[0],
                        pair[1].where,
                        f"process {pid} ({proctree.read(pid, pid, 'comm')}) outside the job's tree has this FIFO open "
                        "too; what is in it would be lost",
                        "use FIFOs only between processes of the job's own container",
                        settles=SOON,
                    )
