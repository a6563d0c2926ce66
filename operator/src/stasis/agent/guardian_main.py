"""The guardian's own process: it lets a frozen tree run on when its agent cannot.

It carries out `core.guardian`. Everything that it needs is imported, opened and tried before the tree is frozen, since
the agent's container, and the files in it, may be gone when it acts. It starts with `python -I -S`: the standard
library and this package alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from stasis.agent import cgroups, durable, proctree
from stasis.agent.freezer import Freezer, GroupGone, now
from stasis.agent.journal import Broken, FrozenTree, StateDir
from stasis.agent.network import lock
from stasis.agent.network.sockets import TCP_REPAIR, TcpSockets
from stasis.agent.records import Records
from stasis.core import machine as m
from stasis.core.driver import GuardianDriver, Reply
from stasis.core.guardian import Guardian, State
from stasis.core.records import Record
from stasis.errors import StasisError

GROUP = "stasis-guardian"
POLL = 0.25  # seconds between two looks at the records
GRACE = 5.0  # seconds in which a CRIU whose agent is gone may let go of the tree by itself
EXEC = 0.3  # seconds in which a CRIU that the agent was just starting has become one
VOLUME = "stasis"  # of `node`, which needs more than the standard library


class Guard:
    """One tree's guardian: the ports of its machine. `agent`: pidfd of the agent that freezes the tree; `channel`: by
    which that one tells it another deadline."""

    def __init__(self, state: StateDir, tree: FrozenTree, agent: int, channel: socket.socket) -> None:
        self.state = state
        self.tree = tree
        self._log = state.log(tree.name)
        self._said = ""
        self._records = Records(Path(tree.records))
        self._freezer = Freezer(tree.cgroup, tree.freezer)
        self._freezer.state()
        self._netns = os.open(f"/proc/{tree.pid1}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        lock.is_locked(self._netns)
        self._volume = _volume(tree.pid1)
        if proctree.start_time(tree.pid1) != tree.pid1_start:
            raise RuntimeError(f"PID 1 of the container is gone (process {tree.pid1})")
        state.prepare_to_fire(tree.name)
        self._agent: int | None = agent
        self._channel: socket.socket | None = channel
        self._called = False
        self._populated = False
        self._let_go = False
        self._orphaned = False
        self._driver = self._drive(tree.deadline / 1e9)
        self._undoing: subprocess.Popen[bytes] | None = None
        self._bell, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Returns when the tree runs and nobody will freeze it again, or when it is gone."""
        self.log(f"guards process {self.tree.root} and its descendants")
        while True:
            try:
                if self._called and self._channel is not None:
                    self._answer(self._channel)
                if self._orphaned:
                    self._agent_died()
                if self._gone():
                    self._unlock()  # a container started anew in its place has the same network
                    self.log("the tree is gone")
                    return
                ended = self.state.ended(self.tree.name)
                if not ended:
                    self._driver.pump()
                if (ended or self._let_go) and not self._free():
                    self.rescue()
                elif ended or (self._let_go and self._agent is None):
                    self.log("the freeze is over")
                    return
                # Else it stays also after a rescue: an agent that was stopped then may freeze the tree again, unaware.
            except Exception as error:  # whatever it is: to end would leave the tree frozen for ever
                self.log(f"trying again: {type(error).__name__}: {error}")
            self._wait()

    def _drive(self, deadline: float) -> GuardianDriver:
        return GuardianDriver(Guardian(self.tree.op, deadline, POLL), clock=self, records=self, fate=self, tree=self)

    # Ports.

    def now(self) -> float:
        return now()

    def claim(self, value: str) -> str:
        assert value == m.FIRED
        fate = self.state.fire(self.tree.name)
        self.log(f"fate: {fate}")
        return fate

    def fate(self) -> str | None:
        return self.state.fate(self.tree.name)

    def read(self, key: str, reply: Reply) -> None:
        try:
            reply(m.RecordIs(key, self._records.read(key)))
        except StasisError as error:
            self.log(str(error))
            reply(m.RecordsDown(key))

    def create(self, key: str, record: Record, reply: Reply) -> None:
        reply(m.RecordIs(key, self._records.create(key, record)))

    def rescue(self) -> bool:
        """CRIU off the tree, its connections free, then the tree: each whatever became of the one before, since a tree
        that runs without its peers is better off than one that is frozen."""
        done = True
        for step in (self._end_criu, self._leave_repair, self._unlock, self._thaw, self._undo_devices):
            try:
                step()
            except GroupGone:
                pass
            except Exception as error:
                self.log(f"{step.__name__.strip('_')}: {type(error).__name__}: {error}")
                done = False
        if done:
            self.log("thawed and unlocked")
            self._let_go = True
        return done

    # Its means.

    def _answer(self, channel: socket.socket) -> None:
        """Hold the deadline that the agent has sent, and say so."""
        self._called = False
        word = channel.recv(64).decode()
        if not word:
            channel.close()
            self._channel = None
            return
        self._driver.post(m.Rearmed(int(word) / 1e9))
        self._driver.pump()
        held = self._driver.machine.state is State.WATCHING
        with contextlib.suppress(BrokenPipeError):
            channel.send((word if held else f"{word} is too late").encode())

    def _agent_died(self) -> None:
        if self.fate() != m.VOTED:
            # Nothing is worth waiting for: what CRIU was saving lived in the agent.
            time.sleep(EXEC)
            if self._driver.machine.state is State.WATCHING:
                self._driver = self._drive(now())
        self._orphaned = False
        self.log("the agent died")

    def _gone(self) -> bool:
        try:
            pids = self._freezer.pids()
        except GroupGone:
            return True
        self._populated |= bool(pids)
        return not pids and (self._populated or proctree.start_time(self.tree.root) != self.tree.root_start)

    def _free(self) -> bool:
        return self._freezer.state() == "thawed" and not lock.is_locked(self._netns)

    def _end_criu(self) -> None:
        """A thaw under a CRIU that is at work kills the tree."""
        end = now() + GRACE
        while pids := _dumping(self.tree.cgroup) | self._tracers():
            if now() > end:
                for pid in pids:
                    self.log(f"killing process {pid}, which dumps or traces the tree")
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if now() > 2 * GRACE + end:
                raise RuntimeError(f"processes {sorted(pids)} do not let go of the tree")
            time.sleep(0.02)

    def _unlock(self) -> None:
        lock.unlock(self._netns)
        if lock.is_locked(self._netns):
            raise RuntimeError("the network is still locked")

    def _thaw(self) -> None:
        frozen = self._freezer.state() != "thawed"
        self._freezer.thaw()
        if self._freezer.state() != "thawed":
            raise RuntimeError("the tree is still frozen")
        if frozen and self._volume is not None:
            with contextlib.suppress(StasisError):  # the volume is full: its probes go on to succeed by our word alone
                durable.replace(self._volume, "state", b"running\n", 0o644)

    def _undo_devices(self) -> None:
        """By a program of its own, which takes the time that GPUs take."""
        note = self.state.path / f"devices-{self.tree.container_id}"
        if note.exists() and (self._undoing is None or self._undoing.poll()):
            command = [sys.executable, "-B", "-m", "stasis.agent.cuda.undo", str(note)]
            env = {"PYTHONPATH": str(Path(__file__).parents[2])}
            self._undoing = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=self._log)

    def _tracers(self) -> set[int]:
        pids = self._freezer.pids()
        return {proctree.tracer(pid, task) for pid in pids for task in proctree.tasks(pid)} - {0}

    def _leave_repair(self) -> None:
        """A CRIU that was killed leaves the connections mute."""
        with TcpSockets(self._freezer.pids()) as sockets:
            for one in sockets:
                if one.socket.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR):
                    one.socket.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)

    def _wait(self) -> None:
        """Until the machine wants to look again, the agent dies, or it rings (SIGUSR1)."""
        due = self._driver.machine.wake_at
        seconds = POLL if due is None else min(max(due - now(), 0.01), POLL)
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if self._agent is not None:
            poll.register(self._agent, select.POLLIN)
        if self._channel is not None:
            poll.register(self._channel, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(seconds * 1000 + 1)]
        if self._bell in ready:
            os.read(self._bell, 4096)
        self._called = self._channel is not None and self._channel.fileno() in ready
        if self._agent in ready:
            self._agent = None
            self._orphaned = True

    def log(self, text: str) -> None:
        """A line of the log; the same one only once in a row."""
        if text != self._said:
            self._said = text
            with contextlib.suppress(OSError):  # a full disk
                os.write(self._log, f"{time.strftime('%FT%TZ', time.gmtime())} {text}\n".encode())


def _dumping(group: str) -> set[int]:
    """The CRIUs, and those that start one, that were given the group's folder, though they may not trace yet."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and "--freeze-cgroup" in proctree.read(int(entry), int(entry), "cmdline"):
            with contextlib.suppress(OSError):
                folders = (os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd"))
                if group in folders:
                    found.add(int(entry))
    return found


def _volume(pid1: int) -> int | None:
    """Descriptor of our volume in the container, never through a symlink of the tenant's; None: it has none."""
    root = os.open(f"/proc/{pid1}/root", os.O_PATH | os.O_DIRECTORY)
    try:
        return os.open(VOLUME, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    except OSError:
        return None
    finally:
        os.close(root)


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
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("-1000")  # without CAP_SYS_RESOURCE it keeps the agent's
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: None)


def main() -> None:
    """`guardian_main STATE-DIR NAME DEADLINE AGENT-PIDFD CHANNEL-FD`: says 'ready' over the channel (SOCK_SEQPACKET),
    or why not on standard error. A deadline (ns of CLOCK_BOOTTIME) that comes over it later is held, and echoed."""
    path, name, *numbers = sys.argv[-5:]
    deadline, agent, fd = map(int, numbers)
    os.set_inheritable(agent, False)
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    try:
        detach()
        state = StateDir(Path(path))
        tree = state.read_tree(name)
        if tree is None or isinstance(tree, Broken):
            raise RuntimeError(f"no journal entry: {tree}")
        guard = Guard(state, replace(tree, deadline=deadline), agent, channel)
        state.write("guardian", name, {"pid": os.getpid(), "start": proctree.start_time(os.getpid())})
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os.dup2(0, 2)
    channel.send(b"ready")
    guard.run()
