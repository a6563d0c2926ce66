"""The gang protocol's ports on a node: threads, a folder of records, guardians as processes.

The machines and their driver are those that the simulation runs; here is only what carries their effects out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stasis.agent import proctree
from stasis.agent.checkpoint import CheckpointRank
from stasis.agent.executor import RankExecutor
from stasis.agent.guardian import Guardian
from stasis.agent.journal import Fate, FrozenTree, StateDir
from stasis.agent.records import Records as RecordsFolder
from stasis.core import machine as m
from stasis.core.driver import Driver, Reply
from stasis.core.records import Record
from stasis.errors import StasisError

log = logging.getLogger(__name__)


class BootClock:
    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class Runner:
    """A thread that pumps one driver whenever something was posted or is due; `close` is called at its end."""

    def __init__(
        self,
        make: Callable[[Callable[[], None]], Driver],
        clock: BootClock,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._close = close
        self._bell = threading.Event()
        self._stopped = False
        self.failure: BaseException | None = None
        self.driver = make(self._bell.set)
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._bell.clear()
                due = self.driver.pump()
                self._bell.wait(None if due is None else max(0.0, due - self._clock.now()))
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._stopped = True
        self._bell.set()
        self._thread.join()
        self._close()


class RecordsPort:
    """The folder of records; a disk that fails answers RecordsDown."""

    def __init__(self, folder: RecordsFolder) -> None:
        self._folder = folder

    def create(self, key: str, record: Record, reply: Reply) -> None:
        self._answer(key, lambda: self._folder.create(key, record), reply)

    def read(self, key: str, reply: Reply) -> None:
        self._answer(key, lambda: self._folder.read(key), reply)

    def _answer(self, key: str, work: Callable[[], Record | None], reply: Reply) -> None:
        try:
            reply(m.RecordIs(key, work()))
        except (OSError, StasisError):
            reply(m.RecordsDown(key))


class JournalPort:
    """One member's journal, an entry of the agent's state folder."""

    def __init__(self, state: StateDir, name: str) -> None:
        self._state = state
        self._name = name

    def load(self) -> dict[str, Any] | None:
        return self._state.read("member", self._name)

    def save(self, journal: Mapping[str, Any]) -> None:
        self._state.write("member", self._name, journal)


class GuardianPort:
    """The guardian of one rank's freeze."""

    def __init__(self, state: StateDir, executor: RankExecutor, records: Path, rank: int) -> None:
        self._state = state
        self._executor = executor
        self._records = records
        self._rank = rank
        frozen = (tree for tree in state.trees() if isinstance(tree, FrozenTree) and tree.rank == rank)
        self._guardian = next((Guardian(state, tree) for tree in frozen), None)  # of an agent before this one

    def arm(self, op: str, deadline: float, poll: float, reply: Reply) -> None:
        threading.Thread(target=self._arm, args=(op, deadline, reply), name=f"guardian-{self._rank}").start()

    def _arm(self, op: str, deadline: float, reply: Reply) -> None:
        try:
            if self._guardian is not None and self._guardian.tree.op == op:
                self._guardian.ensure()
            else:
                self._guardian = Guardian.start(self._state, self._tree(op, deadline))
            reply(m.GuardianUp())
        except StasisError as error:
            log.warning("rank %d: %s", self._rank, error)
            reply(m.GuardianLost())

    def _tree(self, op: str, deadline: float) -> FrozenTree:
        worker = self._executor.worker
        assert isinstance(worker, CheckpointRank)
        pid1, root, freezer = worker.tree
        return FrozenTree(
            op=op,
            rank=self._rank,
            epoch=0,
            container_id=worker.job.container_id,
            pid1=pid1,
            pid1_start=proctree.start_time(pid1),
            cgroup=freezer.path,
            freezer=freezer.version,
            deadline=int(deadline * 1e9),
            records=str(self._records),
            root=root.pid,
            root_start=root.start,
        )

    def claim(self, value: str) -> str:
        if self._guardian is None:
            return m.FIRED
        return str(self._state.claim(self._guardian.tree.name, Fate(value)))

    def fate(self) -> str | None:
        if self._guardian is None:
            return None
        fate = self._state.fate(self._guardian.tree.name)
        return str(fate) if fate else ""

    def disarm(self) -> None:
        if self._guardian is not None:
            self._guardian.stop()
            self._guardian = None
