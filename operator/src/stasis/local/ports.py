"""The gang protocol's ports on one machine: threads, a folder of records, guardians as processes.

The machines and their driver are those that the simulation runs; here is only what carries their effects out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stasis.agent import proctree
from stasis.agent.checkpoint import CheckpointRank
from stasis.agent.guardian import Guardian
from stasis.agent.journal import Fate, FrozenTree, StateDir
from stasis.agent.node import Node
from stasis.agent.records import Records as RecordsFolder
from stasis.agent.restore import RestoreRank
from stasis.core import machine as m
from stasis.core.driver import Driver, Reply
from stasis.core.messages import Message
from stasis.core.plan import PLANS
from stasis.core.records import Failure, Record
from stasis.core.steps import Step
from stasis.errors import Corrupt, Denied, Refused, StasisError, UsageError
from stasis.store.media import Descriptor

log = logging.getLogger(__name__)

WAKE = (Step.UNLOCK_NETWORK, Step.THAW)  # they do not wait for a store that hangs
STORED = "stored"  # kind of the entries that name a rank's manifest
FINAL = (Refused, Corrupt, Denied, UsageError)  # another attempt of a restore would meet the same
FIRST = {plan[0].step for plan in PLANS.values()}


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


class Bus:
    """Delivers messages between the drivers of this process."""

    def __init__(self) -> None:
        self.drivers: dict[str, Driver] = {}

    def send(self, to: str, message: Message) -> None:
        if driver := self.drivers.get(to):
            driver.post(message)


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


class RankExecutor:
    """Carries one rank's steps out, one at a time, each in a thread. `status()` tells how the rank's container ended.

    What the first step was told is journaled, so that a restarted agent can undo what an earlier one began.
    """

    def __init__(
        self,
        node: Node,
        state: StateDir,
        rank: int,
        *,
        status: Callable[[], int | None] = lambda: None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._node = node
        self._state = state
        self._rank = rank
        self._status = status
        self._progress = progress
        self._worker: CheckpointRank | RestoreRank | None = None
        self._key = ""
        self._threads: dict[threading.Thread, Step] = {}  # those at work
        self._watcher: threading.Thread | None = None
        self._over = os.eventfd(0, os.EFD_CLOEXEC)

    @property
    def worker(self) -> CheckpointRank | RestoreRank | None:
        return self._worker

    def close(self) -> None:
        """The operation is over: how the tree ends is nobody's business any more."""
        os.eventfd_write(self._over, 1)
        if self._watcher is not None:
            self._watcher.join()
        os.close(self._over)

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None:
        at_work = list(self._threads.items())
        if at_work and self._worker is not None:
            self._worker.give_up()
        before = [thread for thread, what in at_work if what is not Step.STORE or step not in WAKE]
        thread = threading.Thread(
            target=self._run,
            args=(step, f"{op}.{self._rank}.{attempt}", args, token, limit, reply, before),
            name=f"rank-{self._rank}:{step}",
            daemon=True,
        )
        self._threads[thread] = step
        thread.start()

    def _run(
        self,
        step: Step,
        key: str,
        args: Mapping[str, Any],
        token: int,
        limit: float,
        reply: Reply,
        before: list[threading.Thread],
    ) -> None:
        for thread in before:
            thread.join()
        limiter = threading.Timer(limit, lambda: self._worker and self._worker.give_up())
        limiter.daemon = True
        limiter.start()
        try:
            worker = self._worker_for(key, step, args)
            result = worker.run(step, args)
            if step is Step.PREPARE and isinstance(worker, CheckpointRank):
                self._watch(worker, reply)
            end: m.StepDone | m.StepFailed = m.StepDone(token, result)
        except StasisError as error:
            again = not isinstance(error, FINAL)
            end = m.StepFailed(token, Failure.of(error, rank=self._rank, step=step, retryable=again))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            end = m.StepFailed(token, Failure(type(error).__name__, text, rank=self._rank, step=step))
        limiter.cancel()
        del self._threads[threading.current_thread()]  # before it is told: nobody gives up what is done
        reply(end)

    def _worker_for(self, key: str, step: Step, args: Mapping[str, Any]) -> CheckpointRank | RestoreRank:
        if self._worker is not None and self._key == key:
            return self._worker
        journaled = self._state.read("job", key)
        if journaled is None:
            journaled = {"step": step, "args": dict(args)}
            self._state.write("job", key, journaled)
        first = Step(journaled["step"])
        self._key = key
        if first is Step.PREPARE:
            self._worker = CheckpointRank(self._node, self._progress, self._announce)
        else:
            self._worker = RestoreRank(self._node)
        if step not in FIRST:
            self._worker.recover(journaled["args"])
        return self._worker

    def _announce(self, manifest: Descriptor) -> None:
        """The rank's manifest is to be removed should its checkpoint be aborted."""
        assert self._worker is not None
        job = self._worker.job
        entry = {"op": job.uid, "repository": job.repository, "digest": manifest.digest}
        self._state.write(STORED, f"{job.uid}.{job.rank}", entry)

    def _watch(self, worker: CheckpointRank, reply: Reply) -> None:
        """Tell when the tree ends by itself."""
        _, root, _ = worker.tree
        try:
            pidfd = os.pidfd_open(root.pid)
        except ProcessLookupError:
            reply(m.TreeExited(-1))
            return

        def wait() -> None:
            with contextlib.closing(os.fdopen(pidfd, "rb", buffering=0)):
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.register(self._over, select.POLLIN)
                if self._over in dict(poll.poll()):
                    return
            time.sleep(0.2)  # init takes a moment to pass the status on
            status = self._status()
            reply(m.TreeExited(-1 if status is None else status))

        self._watcher = threading.Thread(target=wait, name=f"rank-{self._rank}:watch", daemon=True)
        self._watcher.start()


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
