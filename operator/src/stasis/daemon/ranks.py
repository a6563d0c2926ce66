"""The ranks of this node that take part in operations: a member for each, from first order to its operation's end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stasis.agent import kept, stored
from stasis.agent.agent import Agent, trim
from stasis.agent.node import Job
from stasis.agent.runner import BootClock, RecordsStore
from stasis.core import machine as m
from stasis.core.frames import Answer, Command, Frame, Home, Progress
from stasis.core.membership import State
from stasis.core.messages import Message, Order, Report, Standing, coordinator_address
from stasis.core.plan import Kind
from stasis.core.records import Failure, Verdict, decision_key, release_key
from stasis.core.steps import Step
from stasis.daemon.metrics import Metrics
from stasis.daemon.pods import Pods, exit_status
from stasis.daemon.rank import Rank, Steps
from stasis.daemon.records import Mirrored, PooledRecords
from stasis.daemon.releases import Releases
from stasis.daemon.uploads import HOME, Uploads
from stasis.errors import StasisError, UsageError
from stasis.store import credentials
from stasis.store.reference import Reference

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5  # between two words of how far a rank is


class Ranks:
    """`records` gives the cluster's records of a checkpoint, `over` tells whether an operation's end is recorded there.

    `send` takes frames for the controller. `failed` is told when a driver ended by an error: what it left is put right
    by a restart of the agent, as after any other death.
    """

    def __init__(
        self,
        agent: Agent,
        pods: Pods,
        records: Callable[[Home], RecordsStore],
        over: Callable[[Home, str], bool],
        uploads: Uploads,
        send: Callable[[Frame], None],
        failed: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        self._agent = agent
        self._pods = pods
        self._records = records
        self._over = over
        self._uploads = uploads
        self._send = send
        self._failed = failed
        self._metrics = metrics
        self._clock = BootClock()
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="records")
        self._lock = threading.RLock()
        self._ranks: dict[str, Rank] = {}
        self.releases = Releases(pods)
        self.releases.start()

    # ------------------------------------------------------------ their lives

    def take_over(self) -> None:
        """Go on with what an agent before this one took part in. Trees that are to be killed wait for their pods."""
        self._agent.take_over(lambda tree: None)
        for name in self._agent.state.names("member"):
            op, _, rank = name.rpartition(".")
            home = self._agent.state.read(HOME, op)
            if home is None:
                log.warning("nobody knows where the records of %s are", op)
                continue
            with self._lock:
                self._add(Rank(op, int(rank), Home.from_dict(home), self._journaled(name)))

    def deliver(self, command: Command) -> None:
        """Give a member its message; it is made where there is none. Raises UsageError, StasisError."""
        op, _, number = command.to.rpartition("#")
        message = command.message
        if op != message.op or not number.isdecimal():
            raise UsageError(f"a message of operation {message.op} to {command.to}")
        rank = Rank(op, int(number), command.home)
        with self._lock:
            if rank.key not in self._ranks:
                if isinstance(message, Order) and (other := self.at_work(message.args.get("container_id", ""))):
                    self._refuse(rank, message, other)
                    return
                if self._agent.state.read(HOME, op) is None:
                    self._agent.state.write(HOME, op, command.home.to_dict())
                self._add(rank)
            rank = self._ranks[rank.key]
            if isinstance(message, Order) and message.index == 0:
                try:
                    rank.job = Job.from_args(message.args)
                except UsageError:
                    pass  # its first step says so
        if command.credentials and rank.job:
            repository = Reference.parse(rank.job.repository)
            credentials.hand_over(repository.host, repository.name, command.credentials)
        assert rank.runner is not None
        rank.runner.driver.post(message)

    def forget(self, op: str) -> None:
        """The operation's end is recorded."""
        with self._lock:
            ours = [rank for rank in self._ranks.values() if rank.op == op]
            for rank in ours:
                del self._ranks[rank.key]
        for rank in ours:
            self._stop(rank)
        self._agent.forget(op)
        if not self._uploads.holds(op):
            self._agent.state.remove(HOME, op)
        self._pool.submit(self._tidy, op, {rank.job.repository for rank in ours if rank.job})
        if ours:
            trim()

    def _tidy(self, op: str, repositories: Collection[str] = ()) -> None:
        """Of an operation that is over: what it stored in vain goes, then what was recorded of it."""
        try:
            stored.settle(self._agent.state, lambda one: self._kept(one) if one == op else None)
            if op not in stored.operations(self._agent.state):
                self._agent.records.forget(op)
        except StasisError as error:
            log.warning("what %s has left stays: %s", op, error)
        with self._lock:
            in_use = {rank.job.repository for rank in self._ranks.values() if rank.job}
        for repository in map(Reference.parse, set(repositories) - in_use):
            credentials.withdraw(repository.host, repository.name)

    def _kept(self, op: str) -> bool:
        """Where nothing is known the controller's own retention decides."""
        decision = self._agent.records.read(decision_key(op))
        return decision is None or decision.verdict is not Verdict.ABORT

    def sweep(self) -> None:
        """Forget the operations whose end nobody told us of, and tidy up what could not be at their end."""
        with self._lock:
            under_way = {rank.op for rank in self._ranks.values()}
        for op in stored.operations(self._agent.state) - under_way:
            self._tidy(op)
        with self._lock:
            idle = {(rank.op, rank.home) for rank in self._ranks.values()}
            idle -= {(rank.op, rank.home) for rank in self._ranks.values() if rank.member.state is not State.IDLE}
        for op, home in idle:
            try:
                if self._over(home, op):
                    self.forget(op)
            except StasisError as error:
                log.info("whether %s is over is not known: %s", op, error)
        self._sweep_kept()

    def _sweep_kept(self) -> None:
        """What lies on this disk for a registry."""
        with self._lock:
            at_work = {rank.op for rank in self._ranks.values()}
        self._uploads.sweep(at_work)
        with self._lock:  # nobody begins to write there
            kept.tidy(self._agent.state, {rank.job.repository for rank in self._ranks.values() if rank.job})

    def close(self) -> None:
        """Leave everything as it is: who comes next goes on with it."""
        self.releases.close()
        self._uploads.close()
        with self._lock:
            ranks = list(self._ranks.values())
            self._ranks.clear()
        for rank in ranks:
            self._stop(rank)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ kubelet

    def of_pod(self, pod_id: str) -> Rank | None:
        """The rank whose pod has this id, where a Release that it has not yet carried out is recorded."""
        with self._lock:
            ours = [rank for rank in self._ranks.values() if rank.job and rank.job.pod and rank.job.pod.id == pod_id]
        for rank in ours:
            member = rank.member
            if self.releases.holds(rank.key) or (member.state is State.FINISHING and Step.RELEASE in member.todo):
                return rank
            if member.kind is Kind.RELEASE and member.state in (State.VOTING, State.VOTED, State.COMMITTED):
                key = release_key(rank.op)
                record = self._store(rank.home).read(key)
                if record is not None and record.verdict is Verdict.RELEASE:
                    assert rank.runner is not None
                    rank.runner.driver.post(m.RecordIs(key, record))  # it need not wait until it looks again
                    return rank
        return None

    def at_work(self, container_id: str) -> Rank | None:
        """The rank in this container, while its operation is not over for it."""
        with self._lock:
            for rank in self._ranks.values():
                if rank.job and rank.job.container_id == container_id and rank.member.state is not State.IDLE:
                    return rank
        return None

    # ------------------------------------------------------------ for the eyes

    def report(self) -> list[dict[str, Any]]:
        with self._lock:
            ranks = list(self._ranks.values())
        return [
            {
                **rank.context,
                "kind": str(rank.member.kind),
                "state": str(rank.member.state),
                "container": rank.job.container_id if rank.job else "",
                "stored": rank.stored,
                "waitsForPod": self.releases.holds(rank.key),
            }
            for rank in ranks
        ]

    def count(self) -> None:
        """Bring the gauges up to date."""
        counts = dict.fromkeys((str(state) for state in State), 0)
        for rank in self.report():
            counts[rank["state"]] += 1
        for state, count in counts.items():
            self._metrics.members.labels(state).set(count)
        self._metrics.frozen.set(len(self._agent.state.names("tree")))

    # ------------------------------------------------------------ parts

    def send(self, to: str, message: Message) -> None:
        """The members' transport."""
        assert isinstance(message, Report)
        self._send(Answer(to, message))

    def _store(self, home: Home) -> RecordsStore:
        return Mirrored(self._records(home), self._agent.records)

    def _add(self, rank: Rank) -> None:
        self._ranks[rank.key] = rank
        rank.runner = self._agent.member(
            rank.op,
            rank.rank,
            clock=self._clock,
            transport=self,
            records=PooledRecords(self._store(rank.home), self._pool),
            status=lambda: self._status(rank),
            progress=lambda count: self._progress(rank, count),
            carry_out=lambda executor: Steps(self.releases, rank, executor),
            observe=lambda machine, event: self._observe(rank, event),
            failed=self._failed,
        )
        rank.runner.start()

    def _stop(self, rank: Rank) -> None:
        rank.leaving.set()
        self.releases.done(rank.key)
        if rank.runner is not None:
            rank.runner.stop()

    def _journaled(self, name: str) -> Job | None:
        """What the last attempt's first step was told."""
        entries = [entry for entry in self._agent.state.names("job") if entry.startswith(f"{name}.")]
        for entry in sorted(entries, key=lambda entry: -int(entry.rpartition(".")[2])):
            if (job := self._agent.state.read("job", entry)) is not None:
                return Job.from_args(job["args"])
        return None

    def _refuse(self, rank: Rank, message: Message, other: Rank) -> None:
        failure = Failure("Busy", f"takes part in operation {other.op}", rank=rank.rank)
        report = Report(rank.op, message.attempt, rank.rank, message.epoch, Standing.ABORTED, failure=failure)
        self.send(coordinator_address(rank.op, message.epoch), report)

    def _status(self, rank: Rank) -> int | None:
        if rank.job is None or rank.job.pod is None:
            return None
        return exit_status(self._pods, rank.job.pod, rank.job.container_id, rank.leaving)

    def _progress(self, rank: Rank, count: int) -> None:
        """`count`: bytes stored so far."""
        self._metrics.stored.inc(max(0, count - rank.stored))
        rank.stored = count
        now = time.monotonic()
        if now >= rank.told + PROGRESS_SECONDS:
            rank.told = now
            self._send(Progress(rank.op, rank.rank, count))

    def _observe(self, rank: Rank, event: m.Event) -> None:
        """What goes on, into log and metrics, before the machine sees it."""
        if isinstance(event, (m.StepDone, m.StepFailed)):
            step = rank.step
            context = {**rank.context, "step": step}
            if isinstance(event, m.StepFailed):
                self._metrics.failures.labels(step, event.failure.reason).inc()
                log.warning("step failed: %s", event.failure, extra=context)
            else:
                seconds = float(event.result.get("ended", 0)) - float(event.result.get("began", 0))
                self._metrics.steps.labels(step).observe(seconds)
                log.info("step done", extra={**context, "seconds": round(seconds, 4)})
        elif isinstance(event, m.TreeExited):
            log.warning("the training ended with status %d", event.status, extra=rank.context)
        elif isinstance(event, m.RecordIs) and event.record is not None:
            log.info("recorded: %s", event.record.verdict, extra=rank.context)
        elif isinstance(event, m.Booted) and event.journal is not None:
            log.info("taken over from an agent before this one", extra=rank.context)
