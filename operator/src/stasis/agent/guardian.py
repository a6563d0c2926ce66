"""The agent's side of a freeze's guardian: a small process outside the agent's control groups, started before the
freeze, that lets the tree run on when the agent cannot.

Before the vote the tree runs on at its deadline, or as soon as the agent dies: what CRIU was saving lived in the
agent's memory and pipes, so the dump is lost and nothing is worth waiting for. After the vote it runs on only when
Abort or Continue is recorded. Which came first, the vote or the guardian, is one atomic claim in the state folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import stasis
from stasis.agent import proctree
from stasis.agent.journal import Fate, FrozenTree, StateDir
from stasis.errors import CheckpointFailed, DeadlineExceeded, StasisError

SOURCE = Path(stasis.__file__).parents[1]
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from stasis.agent.guardian_main import main; main()"
START_LIMIT = 20.0  # seconds: a machine that is this slow must not freeze anything


class Guardian:
    """The guardian of one frozen tree."""

    def __init__(self, state: StateDir, tree: FrozenTree) -> None:
        self.state = state
        self.tree = tree

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
        if self.state.read_tree(self.tree.name) is None:
            return
        self.state.end(self.tree.name)
        self.join(timeout)
        self.state.forget_tree(self.tree.name)

    def join(self, timeout: float) -> None:
        """Wait for the guardian to end by itself: after `state.end`, or when the tree is gone. Raises StasisError."""
        pid = self._pid()
        if not pid:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            self._ring()
            if not _readable(fd, timeout):
                raise StasisError(f"guardian {pid} of rank {self.tree.rank} does not end: {self._last_words()}")
        finally:
            os.close(fd)

    def _launch(self, agent_pidfd: int | None) -> None:
        with contextlib.ExitStack() as opened:
            agent = agent_pidfd if agent_pidfd is not None else os.pidfd_open(os.getpid())
            if agent_pidfd is None:
                opened.callback(os.close, agent)
            ready, theirs = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, ready)
            command = [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(SOURCE), str(self.state.path.absolute())]
            try:
                subprocess.run(
                    [*command, self.tree.name, str(agent), str(theirs)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=theirs,
                    pass_fds=(agent, theirs),
                    env={},
                    cwd="/",
                    check=False,
                )
            finally:
                os.close(theirs)
            answer = ""
            while _readable(ready, START_LIMIT) and (piece := os.read(ready, 4096)):
                answer += piece.decode(errors="replace")
        if answer != "ready":
            cause = (answer.strip().splitlines() or ["no answer"])[-1]
            raise CheckpointFailed(f"rank {self.tree.rank}: its guardian does not start: {cause}")

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

    def _last_words(self) -> str:
        lines = self.state.log_text(self.tree.name).splitlines()
        return lines[-1] if lines else "no log"


def _readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
