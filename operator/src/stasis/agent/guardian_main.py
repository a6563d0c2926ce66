"""The guardian's own process: it lets a frozen tree run on when its agent cannot.

Everything that it needs is imported, opened and tried before the tree is frozen, since the agent's container, and the
files in it, may be gone when it acts. It starts with `python -I -S`: the standard library and this package alone.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from stasis.agent import cgroups, proctree
from stasis.agent.freezer import Freezer, GroupGone
from stasis.agent.journal import Broken, Fate, FrozenTree, StateDir
from stasis.agent.network import lock
from stasis.agent.network.sockets import TcpSockets
from stasis.agent.records import Records
from stasis.core.records import Verdict, decision_key, release_key

GROUP = "stasis-guardian"
POLL = 0.25  # seconds between two looks at the records
GRACE = 2.0  # seconds in which a CRIU whose agent is gone may let go of the tree by itself
RETRY_MAX = 5.0
TCP_REPAIR = 19  # linux/tcp.h


class Guard:
    """One tree's guardian. `agent`: pidfd of the agent that freezes it."""

    def __init__(self, state: StateDir, tree: FrozenTree, agent: int) -> None:
        self.state = state
        self.tree = tree
        self.log_fd = state.log(tree.name)
        self.records = Records(Path(tree.records))
        self.freezer = Freezer(tree.cgroup, tree.freezer)
        self.freezer.state()
        self.netns = os.open(f"/proc/{tree.pid1}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        lock.is_locked(self.netns)
        if proctree.start_time(tree.pid1) != tree.pid1_start:
            raise RuntimeError(f"PID 1 of the container is gone (process {tree.pid1})")
        state.prepare_to_fire(tree.name)
        self.agent: int | None = agent
        self.populated = False
        self.wake, bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)

    def run(self) -> None:
        """Returns when the tree runs and nobody will freeze it again, or when it is gone."""
        failures = 0
        while True:
            try:
                if self._gone():
                    self.log("the tree is gone")
                    return
                if why := self._must_thaw():
                    self.log(f"thawing: {why}")
                    self._rescue()
                    if self.agent is None or self.state.ended(self.tree.name):
                        self.log("thawed and unlocked")
                        return
                    # An agent that was stopped at a bad moment may still freeze it, unaware: stay until it knows.
                failures = 0
                self._wait(POLL)
            except Exception as error:
                # Whatever it is, giving up would leave the tree frozen for ever.
                self.log(f"trying again: {type(error).__name__}: {error}")
                self._wait(min(POLL * 2**failures, RETRY_MAX))
                failures = min(failures + 1, 10)

    def _gone(self) -> bool:
        try:
            pids = self.freezer.pids()
        except GroupGone:
            return True
        self.populated |= bool(pids)
        return not pids and (self.populated or proctree.start_time(self.tree.root) != self.tree.root_start)

    def _must_thaw(self) -> str:
        """Why the tree is to run on now; empty: it is not."""
        name = self.tree.name
        if self.state.ended(name):
            return "the agent ended the freeze"
        fate = self.state.fate(name)
        if fate is None:
            if self.agent is None:
                why = "the agent died before its vote"
            elif time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= self.tree.deadline:
                why = "no vote before the deadline"
            else:
                return ""
            fate = self.state.fire(name)
            if fate is Fate.FIRED:
                return why
        if fate is Fate.FIRED:
            return "given up before"
        for key in (decision_key(self.tree.op), release_key(self.tree.op)):
            record = self.records.read(key)
            if record and record.verdict in (Verdict.ABORT, Verdict.CONTINUE):
                return f"{record.verdict} is recorded"
        return ""

    def _rescue(self) -> None:
        """CRIU off the tree, its connections free, then the tree: each whatever became of the one before, since a tree
        that runs without its peers is better off than one that is frozen. Raises what went wrong."""
        problems: list[Exception] = []
        for step in (self._end_tracers, self._leave_repair, self._unlock, self._thaw):
            try:
                step()
            except GroupGone:
                pass
            except Exception as problem:
                problems.append(problem)
        if problems:
            raise ExceptionGroup("not all undone", problems)

    def _end_tracers(self) -> None:
        end = time.monotonic() + GRACE
        while tracers := self._tracers():
            if time.monotonic() > end:
                for pid in tracers:
                    self.log(f"killing process {pid}, which traces the tree")
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > 2 * GRACE + end:
                raise RuntimeError(f"processes {sorted(tracers)} do not let go of the tree")
            time.sleep(0.02)

    def _unlock(self) -> None:
        lock.unlock(self.netns)
        if lock.is_locked(self.netns):
            raise RuntimeError("the network is still locked")

    def _thaw(self) -> None:
        self.freezer.thaw()
        if self.freezer.state() != "thawed":
            raise RuntimeError("the tree is still frozen")

    def _tracers(self) -> set[int]:
        pids = self.freezer.pids()
        return {proctree.tracer(pid, task) for pid in pids for task in proctree.tasks(pid)} - {0}

    def _leave_repair(self) -> None:
        """A CRIU that was killed leaves the connections mute."""
        with TcpSockets(self.freezer.pids()) as sockets:
            for one in sockets:
                if one.socket.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR):
                    one.socket.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)

    def _wait(self, seconds: float) -> None:
        """Until the time is over, the agent dies, or it rings (SIGUSR1)."""
        left = (self.tree.deadline - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9
        if left > 0:
            seconds = min(seconds, left)
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        if self.agent is not None:
            poll.register(self.agent, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(seconds * 1000 + 1)]
        if self.wake in ready:
            os.read(self.wake, 4096)
        if self.agent in ready:
            self.log("the agent is gone")
            self.agent = None

    def log(self, text: str) -> None:
        try:
            os.write(self.log_fd, f"{time.strftime('%FT%TZ', time.gmtime())} {text}\n".encode())
        except OSError:
            pass  # a full disk


def detach() -> None:
    """Leave the agent's session, groups and everything else by which its end could reach this process."""
    for child in ("leader", "orphan"):
        if os.fork():
            os._exit(0)
        if child == "leader":
            os.setsid()
    os.chdir("/")
    cgroups.outlive(GROUP)
    with open("/proc/self/comm", "w") as comm:
        comm.write(GROUP)
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("-1000")
    except OSError:
        pass  # without CAP_SYS_RESOURCE it keeps the agent's
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: None)


def main() -> None:
    """`guardian_main STATE-DIR NAME AGENT-PIDFD READY-FD`: says 'ready', or why not, on READY-FD, once."""
    path, name, agent, ready = sys.argv[-4], sys.argv[-3], int(sys.argv[-2]), int(sys.argv[-1])
    os.set_inheritable(agent, False)
    try:
        detach()
        state = StateDir(Path(path))
        tree = state.read_tree(name)
        if tree is None or isinstance(tree, Broken):
            raise RuntimeError(f"no journal entry: {tree}")
        guard = Guard(state, tree, agent)
        state.write("guardian", name, {"pid": os.getpid(), "start": proctree.start_time(os.getpid())})
    except Exception as error:
        os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(ready, b"ready")
    os.close(ready)
    guard.log(f"guards process {tree.root} and its children")
    guard.run()
