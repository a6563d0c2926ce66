"""The coordinator of one operation of a gang: checkpoint and release, checkpoint and continue, or restore.

It has no log of its own. What must outlive it is in the records; everything else it asks the members again: a new
coordinator gives the orders from the first one on, and members that are through a stage say so at once with the
result that they had. docs/protocol.md tells the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

from stasis.core import machine as m
from stasis.core.messages import Decided, Order, Report, Standing, coordinator_address, member_address
from stasis.core.plan import PLANS, VOTES, Kind, Outcome, Spec, after
from stasis.core.records import Failure, Record, Verdict, decision_key, end_key, release_key, restored_key
from stasis.core.steps import Step
from stasis.errors import CheckpointFailed, StasisError

Results = Mapping[int, Mapping[str, Any]]
Hook = Callable[[Step, Results], Mapping[int, Mapping[str, Any]]]
"""The caller's word at each barrier before the decision: given all ranks' results of a step, it raises a StasisError
to stop the operation, or returns what is to be added to the arguments of each rank's later steps. Pure: a new
coordinator asks it again."""


def no_hook(step: Step, results: Results) -> Mapping[int, Mapping[str, Any]]:
    """Nothing to compare, nothing to add."""
    return {}


class State(StrEnum):
    RECOVERING = "recovering"  # reads what is recorded already
    STEPPING = "stepping"  # takes all ranks through a stage, before the decision
    DECIDING = "deciding"  # writes Commit or Abort, Restored or Abandoned
    RELEASING = "releasing"  # writes Release or Continue
    SETTLING = "settling"  # tells all ranks what is recorded, until each has done it
    RESUMING = "resuming"  # takes the restored ranks through the stages from the thaw on
    ENDING = "ending"  # writes that nothing is left to do
    ENDED = "ended"


class Coordinator(m.Machine[State]):
    """Leads `spec` in `epoch`; the caller takes a higher epoch for each coordinator that it starts."""

    def __init__(self, spec: Spec, epoch: int, hook: Hook = no_hook) -> None:
        super().__init__(State.RECOVERING)
        self.spec = spec
        self.epoch = epoch
        self.address = coordinator_address(spec.op, epoch)
        self.outcome: Outcome | None = None
        self.attempt = 1
        self.index = 0
        self._hook = hook
        self._plan = PLANS[spec.kind]
        self._restore = spec.kind is Kind.RESTORE
        self._records: dict[str, Record | None] = {}
        self._unread: set[str] = set()
        self._pending: set[int] = set()  # ranks whose answer is awaited
        self._results: dict[int, Mapping[str, Any]] = {}
        self._extra: dict[int, dict[str, Any]] = {}
        self._failures: list[Failure] = []
        self._exited: dict[int, int] = {}  # ranks whose trees ended or were lost, with the exit status
        self._lost: set[int] = set()  # ranks of which nobody will answer
        self._withdrawn = False
        self._told: Record | None = None  # what SETTLING tells
        self._proposal: tuple[str, Record] | None = None
        self._resend_at = 0.0
        self._deadline: float | None = None

    # ------------------------------------------------------------ recovering

    def _started(self, event: m.Started) -> None:
        op = self.spec.op
        keys = [end_key(op)]
        if self._restore:
            keys += [restored_key(op, attempt) for attempt in range(1, self.spec.attempts + 1)]
            keys += [decision_key(self.spec.checkpoint), *map(end_key, self.spec.requires)]
        else:
            keys += [decision_key(op), release_key(op)]
        self._read(keys)

    def _read(self, keys: Iterable[str]) -> None:
        self.wake_at = None
        for key in keys:
            self._unread.add(key)
            self.emit(m.Read(key))

    def _recover(self, event: m.RecordIs) -> None:
        self._records[event.key] = event.record
        self._unread.discard(event.key)
        if not self._unread:
            self._recovered()

    def _recover_later(self, event: m.RecordsDown) -> None:
        self.wake_at = self.now + self.spec.timing.retry

    def _recover_again(self, event: m.Tick) -> None:
        self._read(sorted(self._unread) or [key for key in map(end_key, self.spec.requires) if not self._records[key]])

    def _recovered(self) -> None:
        op, records = self.spec.op, self._records
        ended = records[end_key(op)]
        if ended:
            self._end(ended)
        elif self._restore:
            self._recovered_restore()
        elif decision := records[decision_key(op)]:
            self._follow(records[release_key(op)] or decision)
        elif self._withdrawn:
            self._fail(self._withdrawal())
        else:
            self._begin(0)

    def _recovered_restore(self) -> None:
        spec, records = self.spec, self._records
        made = [r for n in range(1, spec.attempts + 1) if (r := records[restored_key(spec.op, n)])]
        commit = records[decision_key(spec.checkpoint)]
        if made:
            self.attempt = made[-1].attempt
        fits = commit is not None and commit.verdict is Verdict.COMMIT and set(commit.ranks) == set(spec.ranks)
        if commit is not None and fits:
            self._take_manifests(commit)
        if made:
            self._follow(made[-1])
            return
        if self._withdrawn:
            self._fail(self._withdrawal())
            return
        if not fits:
            text = f"checkpoint {spec.checkpoint} is not committed for just the ranks {list(spec.ranks)}"
            self._fail(Failure("NotFound", text, retryable=False))
            return
        ends = [records[end_key(op)] for op in spec.requires]
        if any(end and end.outcome not in (Outcome.RELEASED, Outcome.ABANDONED) for end in ends):
            text = f"ranks of {', '.join(spec.requires)} run: a rank cannot run in two places"
            self._fail(Failure("RestoreFailed", text, retryable=False))
        elif None in ends:
            self.wake_at = self.now + spec.timing.poll
        else:
            self._begin(0)

    def _take_manifests(self, commit: Record) -> None:
        """All ranks are restored from one Commit, whatever else the caller says."""
        for rank in self.spec.ranks:
            self._extra[rank] = {"checkpoint": commit.op, "manifest": commit.manifests[rank]}

    def _withdraw_early(self, event: m.Withdraw) -> None:
        self._withdrawn = True
        if not self._unread:
            self._recovered()

    # ------------------------------------------------------------ stages

    def _begin(self, index: int) -> None:
        self.state = State.STEPPING
        self._stage(index)
        self._deadline = self.now + self.spec.timing.limit(self._plan[index].step) + self.spec.timing.margin
        self._wait()
        for rank in sorted(self._lost):
            self._fail(self._loss(rank))
            break

    def _stage(self, index: int) -> None:
        self.index = index
        self._pending = set(self.spec.ranks)
        self._results = {}
        self.emit(m.StageBegun(self._plan[index], self.attempt))
        self._order()

    def _order(self) -> None:
        spec, step = self.spec, self._plan[self.index].step
        self._resend_at = self.now + spec.timing.resend
        record = self._told if self.state is State.RESUMING else None
        for rank in sorted(self._pending):
            args = spec.args_for(step, rank)
            if rank in self._extra:
                args |= self._extra[rank]
            order = Order(
                spec.op, spec.serial, spec.kind, self.attempt, self.epoch, self.index, spec.timing, args, record
            )
            self.emit(m.Send(member_address(spec.op, rank), order))

    def _wait(self) -> None:
        self.wake_at = self._resend_at if self._deadline is None else min(self._resend_at, self._deadline)

    def _heard(self, report: Report) -> bool:
        """Whether the report is about what is going on now, from a member that still obeys."""
        if report.standing is Standing.STALE:
            self._leave(Outcome.SUPERSEDED)
            return False
        if report.exited is not None:
            self._exited[report.rank] = report.exited
        return report.attempt == self.attempt

    def _step_report(self, report: Report) -> None:
        if not self._heard(report) or report.rank not in self._pending:
            return
        if self._restore and report.exited is not None:
            self._fail(Failure("RankExited", "its restored tree is gone", rank=report.rank))
        elif report.standing is Standing.DONE and report.index == self.index:
            self._results[report.rank] = report.result
            self._pending.discard(report.rank)
            if not self._pending:
                self._through()
        elif report.standing in (Standing.ABORTED, Standing.SETTLED):
            text = "gave up before its vote"
            self._fail(report.failure or Failure("CheckpointFailed", text, rank=report.rank))

    def _through(self) -> None:
        """The barrier: every rank is through the stage."""
        stage = self._plan[self.index]
        self.emit(m.StageDone(stage, self.attempt, self._results))
        try:
            for rank, args in self._hook(stage.step, self._results).items():
                self._extra.setdefault(rank, {}).update(args)
            if self.index == VOTES[self.spec.kind]:
                self._propose(self._success())
                return
        except StasisError as error:
            self._fail(Failure.of(error, step=stage.step))
            return
        in_flight = any(result.get("in_flight", 0) for result in self._results.values())
        self._begin(after(self.spec.kind, self.index, in_flight=in_flight))

    def _success(self) -> Record:
        spec = self.spec
        if self._restore:
            return Record(Verdict.RESTORED, spec.op, self.epoch, self.attempt, spec.ranks, spec.finished)
        manifests = {rank: str(result.get("manifest", "")) for rank, result in sorted(self._results.items())}
        if missing := [rank for rank, digest in manifests.items() if not digest]:
            raise CheckpointFailed(f"ranks {missing} stored no manifest")
        return Record(Verdict.COMMIT, spec.op, self.epoch, 1, spec.ranks, spec.finished, manifests)

    def _step_tick(self, event: m.Tick) -> None:
        if self._deadline is not None and self.now >= self._deadline:
            step, ranks = self._plan[self.index].step, sorted(self._pending)
            rank = ranks[0] if len(ranks) == 1 else None
            self._fail(Failure("DeadlineExceeded", f"ranks {ranks} are not through {step} in time", "", rank, step))
            return
        self._order()
        self._wait()

    def _step_withdraw(self, event: m.Withdraw) -> None:
        self._withdrawn = True
        self._fail(self._withdrawal())

    def _step_lost(self, event: m.Lost) -> None:
        self._note_lost(event)
        self._fail(self._loss(event.rank))

    def _note_lost(self, event: m.Lost) -> None:
        self._lost.add(event.rank)
        self._exited.setdefault(event.rank, -1)

    def _note_withdraw(self, event: m.Withdraw) -> None:
        self._withdrawn = True

    def _withdrawal(self) -> Failure:
        return Failure("Withdrawn", "the caller no longer wants it", retryable=False)

    def _loss(self, rank: int) -> Failure:
        return Failure("RankLost", "its container is gone", rank=rank, retryable=False)

    # ------------------------------------------------------------ decisions

    def _fail(self, failure: Failure) -> None:
        """Propose that it comes to nothing. Another record may have been first, and is followed then."""
        self._failures.append(failure)
        verdict = Verdict.ABANDONED if self._restore else Verdict.ABORT
        spec = self.spec
        self._propose(
            Record(verdict, spec.op, self.epoch, self.attempt, spec.ranks, spec.finished, failures=(failure,))
        )

    def _propose(self, record: Record) -> None:
        self.state = State.DECIDING
        self._deadline = None
        op = self.spec.op
        self._write(restored_key(op, self.attempt) if self._restore else decision_key(op), record)

    def _write(self, key: str, record: Record) -> None:
        self.wake_at = None
        self._proposal = (key, record)
        self.emit(m.Create(key, record))

    def _write_later(self, event: m.RecordsDown) -> None:
        self.wake_at = self.now + self.spec.timing.retry

    def _write_again(self, event: m.Tick) -> None:
        assert self._proposal is not None
        self._write(*self._proposal)

    def _written(self, event: m.RecordIs) -> None:
        if self._proposal and event.key == self._proposal[0] and event.record:
            self._follow(event.record)

    def _follow(self, record: Record) -> None:
        """Do what is recorded, whoever recorded it."""
        self.emit(m.Recorded(record))
        if record.failures and record.failures[0] not in self._failures:
            self._failures.extend(record.failures)
        self._told = record
        match record.verdict:
            case Verdict.COMMIT:
                self._release()
            case Verdict.RESTORED:
                self._failures.clear()  # of earlier attempts
                self._resume(VOTES[self.spec.kind] + 1)
            case _:
                self._settle()

    def _release(self, event: m.Tick | None = None) -> None:
        """Release or Continue, by what is known at this moment."""
        self.state = State.RELEASING
        go_on = self.spec.kind is Kind.CONTINUE or (self._withdrawn and not self._exited)
        verdict = Verdict.CONTINUE if go_on else Verdict.RELEASE
        spec = self.spec
        record = Record(verdict, spec.op, self.epoch, 1, spec.ranks, spec.finished)
        self._write(release_key(spec.op), record)

    def _busy_report(self, report: Report) -> None:
        self._heard(report)

    # ------------------------------------------------------------ settling

    def _settle(self) -> None:
        self.state = State.SETTLING
        self._pending = set(self.spec.ranks) - self._lost
        self._tell()
        self._settled()

    def _tell(self) -> None:
        spec = self.spec
        assert self._told is not None
        for rank in sorted(self._pending):
            decided = Decided(spec.op, spec.serial, spec.kind, self.attempt, self.epoch, spec.timing, self._told)
            self.emit(m.Send(member_address(spec.op, rank), decided))
        self.wake_at = self.now + spec.timing.resend

    def _settle_tick(self, event: m.Tick) -> None:
        self._tell()

    def _settle_report(self, report: Report) -> None:
        if not self._heard(report):
            return
        failure = report.failure
        if failure and failure not in self._failures:
            self._failures.append(failure)
        if report.standing is Standing.SETTLED:
            self._pending.discard(report.rank)
            self._settled()

    def _settle_lost(self, event: m.Lost) -> None:
        self._note_lost(event)
        self._pending.discard(event.rank)
        self._settled()

    def _settled(self) -> None:
        if self._pending:
            return
        assert self._told is not None
        match self._told.verdict:
            case Verdict.RELEASE:
                self._finish(Outcome.RELEASED)
            case Verdict.CONTINUE:
                self._finish(Outcome.CONTINUED)
            case Verdict.ABORT:
                self._finish(Outcome.ABORTED)
            case _:
                self._abandoned()

    def _abandoned(self) -> None:
        """Whether another attempt follows is to be read from the records alone: another leader may have begun it. So
        what this one does not want is closed by a record too."""
        assert self._told is not None
        if self.attempt == self.spec.attempts or not all(failure.retryable for failure in self._told.failures):
            self._finish(Outcome.ABANDONED)
            return
        self.attempt += 1
        if self._withdrawn:
            self._fail(self._withdrawal())
        else:
            self._begin(0)

    # ------------------------------------------------------------ restored: it only goes forward

    def _resume(self, index: int) -> None:
        self.state = State.RESUMING
        self._deadline = None
        self._stage(index)
        self._pending -= self._lost | {failure.rank for failure in self._failures}
        self._wait()
        self._resumed()

    def _resume_report(self, report: Report) -> None:
        if not self._heard(report) or report.rank not in self._pending:
            return
        if report.standing is Standing.FAILED:
            self._failures.append(report.failure or self._loss(report.rank))
        elif report.standing is not Standing.SETTLED and not (
            report.standing is Standing.DONE and report.index == self.index
        ):
            return
        self._results[report.rank] = report.result
        self._pending.discard(report.rank)
        self._resumed()

    def _resume_tick(self, event: m.Tick) -> None:
        self._order()
        self._wait()

    def _resume_lost(self, event: m.Lost) -> None:
        self._note_lost(event)
        if event.rank in self._pending:
            self._failures.append(self._loss(event.rank))
            self._pending.discard(event.rank)
            self._resumed()

    def _resumed(self) -> None:
        if self._pending:
            return
        self.emit(m.StageDone(self._plan[self.index], self.attempt, self._results))
        if self.index + 1 < len(self._plan):
            self._resume(self.index + 1)
        else:
            self._finish(Outcome.BROKEN if self._failures or self._lost else Outcome.RESTORED)

    # ------------------------------------------------------------ the end

    def _finish(self, outcome: Outcome) -> None:
        self.state = State.ENDING
        spec, failures = self.spec, tuple(self._failures)
        record = Record(
            Verdict.ENDED,
            spec.op,
            self.epoch,
            self.attempt,
            spec.ranks,
            spec.finished,
            outcome=outcome,
            failures=failures,
        )
        self._write(end_key(spec.op), record)

    def _finished(self, event: m.RecordIs) -> None:
        if event.key == end_key(self.spec.op) and event.record:
            self._end(event.record)

    def _end(self, record: Record) -> None:
        self._failures = list(record.failures)
        self._leave(Outcome(record.outcome))

    def _leave(self, outcome: Outcome) -> None:
        self.state = State.ENDED
        self.outcome = outcome
        self.wake_at = None
        self.emit(m.Ended(outcome, tuple(self._failures), dict(self._exited)))

    TABLE: ClassVar[Mapping[tuple[Any, type], str]] = {
        (State.RECOVERING, m.Started): "_started",
        (State.RECOVERING, m.RecordIs): "_recover",
        (State.RECOVERING, m.RecordsDown): "_recover_later",
        (State.RECOVERING, m.Tick): "_recover_again",
        (State.RECOVERING, m.Withdraw): "_withdraw_early",
        (State.RECOVERING, m.Lost): "_note_lost",
        (State.STEPPING, Report): "_step_report",
        (State.STEPPING, m.Tick): "_step_tick",
        (State.STEPPING, m.Withdraw): "_step_withdraw",
        (State.STEPPING, m.Lost): "_step_lost",
        (State.DECIDING, m.RecordIs): "_written",
        (State.DECIDING, m.RecordsDown): "_write_later",
        (State.DECIDING, m.Tick): "_write_again",
        (State.DECIDING, m.Withdraw): "_note_withdraw",
        (State.DECIDING, m.Lost): "_note_lost",
        (State.DECIDING, Report): "_busy_report",
        (State.RELEASING, m.RecordIs): "_written",
        (State.RELEASING, m.RecordsDown): "_write_later",
        (State.RELEASING, m.Tick): "_release",
        (State.RELEASING, m.Withdraw): "_note_withdraw",
        (State.RELEASING, m.Lost): "_note_lost",
        (State.RELEASING, Report): "_busy_report",
        (State.SETTLING, Report): "_settle_report",
        (State.SETTLING, m.Tick): "_settle_tick",
        (State.SETTLING, m.Withdraw): "_note_withdraw",
        (State.SETTLING, m.Lost): "_settle_lost",
        (State.RESUMING, Report): "_resume_report",
        (State.RESUMING, m.Tick): "_resume_tick",
        (State.RESUMING, m.Lost): "_resume_lost",
        (State.ENDING, m.RecordIs): "_finished",
        (State.ENDING, m.RecordsDown): "_write_later",
        (State.ENDING, m.Tick): "_write_again",
        (State.ENDING, Report): "_busy_report",
    }
