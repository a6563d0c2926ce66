"""An agent on its node: what it keeps there, and the members of the ranks that it takes part for."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

from stasis.agent.executor import RankExecutor
from stasis.agent.journal import BOOT_ID, FrozenTree, StateDir
from stasis.agent.node import Node
from stasis.agent.ports import GuardianPort, JournalPort
from stasis.agent.reconcile import Standing, helper, kill, reconcile
from stasis.agent.records import Records
from stasis.agent.runner import BootClock, RecordsPort, Runner
from stasis.agent.volume import write_word
from stasis.core import driver
from stasis.core.driver import MemberDriver
from stasis.core.member import Member

log = logging.getLogger(__name__)


class Agent:
    """`folder` is this agent's alone and outlives it; `host`: where the machine's root file system is seen. `records`
    are those that the guardians here read."""

    def __init__(self, folder: Path, *, host: str = "/") -> None:
        self.state = StateDir(folder)
        self.node = Node(folder, host=host, journal=lambda pid: helper(self.state, pid))
        self.records = Records(folder / "records")

    def close(self) -> None:
        self.node.close()
        self.records.close()
        self.state.close()

    def member(
        self,
        op: str,
        rank: int,
        *,
        clock: BootClock,
        transport: driver.Transport,
        records: driver.Records | None = None,
        status: Callable[[], int | None] = lambda: None,
        progress: Callable[[int], None] | None = None,
        carry_out: Callable[[RankExecutor], driver.Executor] = lambda executor: executor,
        observe: driver.Observer | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> Runner:
        """One rank's member in one operation, from its journal on; not yet started.

        `records`: default are the node's. `status` tells how the rank's container ended, None while it runs;
        `carry_out` may put something before the executor of its steps; `failed` is told why its driver ended.
        """
        executor = RankExecutor(self.node, self.state, rank, status=status, progress=progress)
        return Runner(
            lambda wake: MemberDriver(
                Member(rank),
                boot=BOOT_ID.read_text().strip(),
                clock=clock,
                transport=transport,
                records=records or RecordsPort(self.records),
                executor=carry_out(executor),
                guardian=GuardianPort(self.state, executor, self.state.path / "records", op, rank),
                journal=JournalPort(self.state, f"{op}.{rank}"),
                wake=wake,
                observe=observe,
            ),
            clock,
            executor.close,
            failed,
        )

    def take_over(self, release: Callable[[FrozenTree], None] | None = None) -> None:
        """What an agent before this one froze is watched again, or let go; its helpers are ended. `release` is called
        for trees that are to be killed; default is to kill them."""
        for found in reconcile(self.state, release or _release):
            if found.standing is Standing.BROKEN:
                log.warning("%s: %s", found.name, found.cause)

    def forget(self, op: str) -> None:
        """The journal entries of an operation that has ended."""
        for kind in ("job", "member"):
            for name in self.state.names(kind):
                if name.startswith(f"{op}."):
                    self.state.remove(kind, name)


def trim() -> None:
    """Give memory back that threads of an operation have freed and glibc keeps."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # a libc that keeps nothing
        pass


def _release(tree: FrozenTree) -> None:
    write_word(tree.pid1, "word", "released")
    kill(tree)
