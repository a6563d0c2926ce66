"""What is wrong with processes themselves: traced, in namespaces of their own, outside the tree, in a strange state."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stasis.agent import proctree
from stasis.agent.lookup import children, namespace
from stasis.agent.scan import kcmp
from stasis.agent.scan.observation import SOON, Observation
from stasis.agent.scan.snapshot import Process, Tree, read_process

# A tree that was restored before lives in a time namespace of its own, as a whole: it is compared with its root.
_LIKE_INIT = ("mnt", "net", "ipc", "uts", "pid", "pid_for_children", "user", "cgroup")
_LIKE_ROOT = ("time", "time_for_children")
_WORDS = {"mnt": "mount", "net": "network", "pid_for_children": "PID (for its children)", "uts": "UTS", "ipc": "IPC",
          "pid": "PID", "time_for_children": "time (for its children)"}  # fmt: skip


_LONG = 5.0  # seconds in one place: writing a large file to a slow disk is no reason to refuse
# where the parent of a vfork waits, which is said with its child
_VFORK = {"kernel_clone", "wait_for_vfork_done"}


def observe(tree: Tree) -> Iterator[Observation]:
    for process in tree.processes:
        yield from _traced(tree, process)
        if process.zombie:
            yield from _zombie_leader(process)
            continue
        yield from _namespaces(tree, process)
    yield from _shared_memory_space(tree)
    yield from _orphans(tree)


def _traced(tree: Tree, process: Process) -> Iterator[Observation]:
    for thread, tracer in process.tracer.items():
        where = "" if thread == process.pid else f"thread {thread}"
        inside = "a process of the job itself" if tracer in tree.pids else "a process outside the job's tree"
        yield Observation.of(
            process,
            where,
            f"it is traced by process {tracer} ({proctree.read(tracer, tracer, 'comm')}), {inside}; "
            "two tracers cannot be attached at once",
            "end the debugger, profiler or strace (gdb, py-spy, strace) that is attached to it",
        )


def _zombie_leader(process: Process) -> Iterator[Observation]:
    living = [thread for thread in process.threads if proctree.state(process.pid, thread) not in "ZX"]
    if living:
        yield Observation.of(
            process,
            f"thread {living[0]}",
            "its main thread has ended while other threads run on, which CRIU cannot restore",
            "let the main thread wait for the others (join) instead of ending alone",
            settles=SOON,
        )


def _namespaces(tree: Tree, process: Process) -> Iterator[Observation]:
    for kinds, model in ((_LIKE_INIT, tree.pid1), (_LIKE_ROOT, tree.root.pid)):
        for kind in kinds:
            home = namespace(model, kind)
            for thread in process.threads:
                own = namespace(process.pid, kind, thread)
                if own and home and own != home:
                    where = f"ns/{kind} -> {own}" + (f" of thread {thread}" if thread != process.pid else "")
                    yield Observation.of(
                        process,
                        where,
                        f"it has its own {_WORDS.get(kind, kind)} namespace",
                        "run the job without unshare, sandboxes or nested containers inside its container",
                    )
                    break


def stuck(tree: Tree) -> Iterator[Observation]:
    """A thread that waits without end for a device or a file server cannot be frozen; a frozen one looks the same, so
    this is asked of running trees. One that moves between two readings is only busy: its count of context switches,
    part of `where`, differs."""
    threads = [(process, thread) for process in tree.living for thread in process.threads]
    for process, thread in threads:
        if proctree.state(process.pid, thread) != "D":
            continue
        status = proctree.read(process.pid, thread, "status")
        switches = re.search(r"^voluntary_ctxt_switches:\s+(\d+)$", status, re.MULTILINE)
        channel = proctree.read(process.pid, thread, "wchan")
        if channel in _VFORK:
            continue
        yield Observation.of(
            process,
            f"thread {thread}, after {switches[1] if switches else '?'} waits",
            f"it is stuck in the kernel (state D, {channel or 'unknown'}) and cannot be frozen",
            "look at the volume, device or child (vfork) that it waits for; ask again when it is back",
            settles=_LONG,
        )


def _shared_memory_space(tree: Tree) -> Iterator[Observation]:
    """clone(CLONE_VM) without CLONE_THREAD, also a vfork whose child has not called exec yet."""
    for process in tree.living:
        parent = tree.by_pid.get(process.parent)
        if parent and not parent.zombie and kcmp.same_memory(process.pid, parent.pid):
            yield Observation.of(
                process,
                "",
                f"it shares its memory with its parent, process {parent.pid} ({parent.comm}), without being a thread "
                "of it (CLONE_VM, vfork), which CRIU cannot restore",
                "wait for its exec, or start it with fork or posix_spawn",
                settles=SOON,
            )


def _orphans(tree: Tree) -> Iterator[Observation]:
    """Children of init beside the root: a checkpoint of the root's tree would silently lose them."""
    for pid in children(tree.pid1):
        process = read_process(pid)
        if pid in tree.pids or process is None or process.zombie or process.parent != tree.pid1:
            continue
        yield Observation.of(
            process,
            "",
            "it is a child of init (PID 1), not of the job's tree, so it would be lost",
            "end it, or start it from the job's command (what `exec` into the container left behind counts too)",
            settles=SOON,
        )
