"""The gang protocol's ports on a node: journals, guardians as processes.

The machines and their driver are those that the simulation runs; here is only what carries their effects out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stasis.agent import proctree
from stasis.agent.checkpoint import CheckpointRank
from stasis.agent.executor import RankExecutor
from stasis.agent.guardian import Guardian
from stasis.agent.journal import Fate, FrozenTree, StateDir
from stasis.core import machine as m
from stasis.core.driver import Reply
from stasis.errors import StasisError

log = logging.getLogger(__name__)


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

    def __init__(self, state: StateDir, executor: RankExecutor, records: Path, op: str, rank: int) -> None:
        self._state = state
        self._executor = executor
        self._records = records
        self._rank = rank
        tree = state.read_tree(f"{op}.{rank}")
        self._guardian = Guardian(state, tree) if isinstance(tree, FrozenTree) else None  # of an agent before this one
        self._deadline: float | None = None  # None: it is not wanted, or no longer
        self._arming = threading.Lock()

    def arm(self, op: str, deadline: float, poll: float, reply: Reply) -> None:
        self._deadline = deadline
        threading.Thread(target=self._arm, args=(op, reply), name=f"guardian-{self._rank}", daemon=True).start()

    def _arm(self, op: str, reply: Reply) -> None:
        """The deadline that was asked for last counts, whichever call comes to it first."""
        try:
            with self._arming:
                deadline = self._deadline
                if deadline is None:
                    return
                if self._guardian is not None and self._guardian.tree.op == op:
                    started = self._guardian.rearm(int(deadline * 1e9))
                else:
                    self._guardian = Guardian.start(self._state, self._tree(op, deadline))
                    started = True
                guardian = self._guardian
            reply(m.GuardianUp(deadline))
        except StasisError as error:
            log.warning("rank %d: %s", self._rank, error)
            reply(m.GuardianLost())
            return
        if started:  # this thread goes on to see whether it dies
            guardian.join(None)
            if guardian is self._guardian:
                log.info("rank %d: its guardian has ended: %s", self._rank, guardian.last_words())
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
        self._deadline = None
        with self._arming:
            guardian, self._guardian = self._guardian, None
            if guardian is not None:
                guardian.stop()
