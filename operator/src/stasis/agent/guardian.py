"""The agent's side of a freeze's guardian: a small process outside the agent's control groups, started before the
freeze, that lets the tree run on when the agent cannot.

To start it takes a tenth of a second, so it stands by from the preparation on, and is told the freeze's deadline just
before the freeze. One whose freeze never comes ends as any other does: with the operation, or without its agent.

Before the vote the tree runs on at its deadline, or as soon as the agent dies: what CRIU was saving lived in the
agent's memory and pipes, so the dump is lost and nothing is worth waiting for. After the vote it runs on only when
Abort or Continue is recorded. Which came first, the vote or the guardian, is one atomic claim in the state folder.
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
from typing import Self

import stasis
from stasis.agent import proctree
from stasis.agent.journal import Fate, FrozenTree, StateDir
from stasis.errors import CheckpointFailed, DeadlineExceeded, StasisError

SOURCE = Path(stasis.__file__).parents[1]
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from stasis.agent.guardian_main import main; main()"
EXIT_SECONDS = 1.0  # from the moment when it hangs up until its process is gone
START_LIMIT = 20.0  # seconds until it answers: a machine that is this slow must not freeze anything


class Guardian:
    """The guardian of one frozen tree. `tree.deadline` is the one that it holds; the journal has the first one."""

    def __init__(self, state: StateDir, tree: FrozenTree) -> None:
        self.state = state
        self.tree = tree
        self._channel: socket.socket | None = None  # None: an agent before this one has started it

    @classmethod
    def start(cls, state: StateDir, tree: FrozenTree, agent_pidfd: int | None = None) -> Self:
        """Journal the freeze that is about to begin, and start its guardian; its freezer group is there already.

        `agent_pidfd`: of the process whose death ends the freeze; default: this one. Returns when the guardian has
        opened all that it needs. Idempotent. Raises CheckpointFailed where it cannot, and leaves nothing behind then.
        """
        guardian = cls(state, tree)
        if state.read_tree(tree.name) is not None:
            guardian.ensure()
            return guardian
        state.write_tree(tree)
        try:
            guardian._launch(agent_pidfd)
        except BaseException:
            state.forget_tree(tree.name)
            raise
        return guardian

    def alive(self) -> bool:
        return bool(self._pid())

    def ensure(self) -> bool:
        """Start another guardian where it was killed; returns whether that was so. Raises CheckpointFailed."""
        if self.alive():
            return False
        self._launch(None)
        return True

    def rearm(self, deadline: int) -> bool:
        """Have it hold another deadline (ns of CLOCK_BOOTTIME); returns when it does. Idempotent.

        Where it was killed another one is started; returns whether that was so. One that an agent before this one has
        started keeps its own: the fate of that freeze is decided, and no deadline matters any more. Raises
        CheckpointFailed where it does not answer or has let the tree run already.
        """
        if deadline != self.tree.deadline and self._channel is not None and self.alive():
            answer = self._ask(self._channel, str(deadline))
            if answer != str(deadline) and not self._ends():
                raise CheckpointFailed(f"rank {self.tree.rank}: its guardian holds no other deadline: {answer}")
        self.tree = replace(self.tree, deadline=deadline)
        return self.ensure()

    def check(self) -> None:
        """Raises CheckpointFailed where the tree was let go: what was captured since the freeze is void."""
        if self.state.fate(self.tree.name) is Fate.FIRED:
            raise CheckpointFailed(f"rank {self.tree.rank}: its guardian let the tree run on before the vote")

    def vote(self) -> None:
        """The rank is complete: from now on only a recorded decision lets the tree run. Idempotent.

        Raises DeadlineExceeded where the guardian was first, or the deadline has passed.
        """
        name = self.tree.name
        late = time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= self.tree.deadline
        if self.state.claim(name, Fate.FIRED if late else Fate.VOTED) is Fate.FIRED:
            self._ring()
            raise DeadlineExceeded(f"rank {self.tree.rank}: the guardian let the tree run on before the vote")

    def stop(self, timeout: float = 30.0) -> None:
        """The freeze is over, the tree thawed or gone: end the guardian and forget the tree. Idempotent.

        The guardian looks that the tree is thawed and unlocked before it ends. Raises StasisError where that takes
        longer than `timeout` seconds; it goes on trying.
        """
        if self.state.read_tree(self.tree.name) is not None:
            self.state.end(self.tree.name)
            self.join(timeout)
            self.state.forget_tree(self.tree.name)
        self._hang_up()

    def join(self, timeout: float | None) -> None:
        """Wait for the guardian to end by itself: after `state.end`, or when the tree is gone. Raises StasisError where
        that takes longer than `timeout` seconds."""
        self._ring()
        if not self._ends(timeout):
            raise StasisError(f"guardian {self._pid()} of rank {self.tree.rank} does not end: {self.last_words()}")

    def _ends(self, timeout: float | None = EXIT_SECONDS) -> bool:
        """Whether it is gone within `timeout` seconds."""
        pid = self._pid()
        if not pid:
            return True
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return _readable(fd, timeout)
        finally:
            os.close(fd)

    def _launch(self, agent_pidfd: int | None) -> None:
        with contextlib.ExitStack() as opened:
            agent = agent_pidfd if agent_pidfd is not None else os.pidfd_open(os.getpid())
            if agent_pidfd is None:
                opened.callback(os.close, agent)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.callback(ours.close)
            command = [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(SOURCE), str(self.state.path.absolute())]
            with theirs:
                subprocess.run(
                    [*command, self.tree.name, str(self.tree.deadline), str(agent), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=theirs.fileno(),
                    pass_fds=(agent, theirs.fileno()),
                    env={},
                    cwd="/",
                    check=False,
                )
            answer = ""
            while answer != "ready" and _readable(ours.fileno(), START_LIMIT) and (piece := ours.recv(4096)):
                answer += piece.decode(errors="replace")
            if answer != "ready":
                cause = (answer.strip().splitlines() or ["no answer"])[-1]
                raise CheckpointFailed(f"rank {self.tree.rank}: its guardian does not start: {cause}")
            self._hang_up()
            self._channel = socket.socket(fileno=ours.detach())

    @staticmethod
    def _ask(channel: socket.socket, word: str) -> str:
        """The guardian's answer to a word; answers to earlier ones, which nobody awaited any more, are passed over."""
        try:
            channel.send(word.encode())
            while _readable(channel.fileno(), START_LIMIT) and (answer := channel.recv(4096).decode()):
                if answer.split()[0] == word:
                    return answer
        except OSError as gone:
            return str(gone)
        return "no answer"

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _pid(self) -> int:
        """0: there is none."""
        try:
            entry = self.state.read("guardian", self.tree.name) or {}
            pid, start = int(entry["pid"]), int(entry["start"])
        except (StasisError, KeyError, ValueError):
            return 0
        return pid if proctree.start_time(pid) == start and not proctree.dead(pid) else 0

    def _ring(self) -> None:
        if pid := self._pid():
            try:
                os.kill(pid, signal.SIGUSR1)
            except ProcessLookupError:
                pass

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.state.log_text(self.tree.name).splitlines()
        return lines[-1] if lines else "no log"


def _readable(fd: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))
