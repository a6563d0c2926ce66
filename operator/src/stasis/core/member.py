"""One rank's side of an operation: the agent's, in the container that the operation is about.

Before its vote a member may give up by itself, and does so at its deadline, at any failure and when the agent was
restarted. After it, only the records count: it tries to write Abort (or Abandoned) at its deadline and does what it
reads. A freeze has a guardian besides, for when the agent cannot; which of the two was first, the vote or the
guardian, is one atomic claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from stasis.core import machine as m
from stasis.core.membership import Membership, State
from stasis.core.messages import Decided, Order, Standing
from stasis.core.plan import INTRUDES, PLANS, VOTES, Kind, follows, undoing
from stasis.core.records import Failure, Record, Verdict, decision_key, release_key, restored_key
from stasis.core.steps import Step

TRIES = 3  # of a step of a rank that is restored; what fails then is told


class Member(Membership):
    """The member of `rank`: one machine for all operations that its container sees."""

    # ------------------------------------------------------------ the agent starts

    def _booted(self, event: m.Booted) -> None:
        self.boot = event.boot
        saved = event.journal
        if saved is None:
            return
        state = self._load(saved)
        rebooted = saved["boot"] != event.boot
        if rebooted and state is not State.IDLE and self.exited is None:
            self.exited = -1
        self._armed = self.kind is not Kind.RESTORE and event.fate is not None and not rebooted
        if state is State.FINISHING:
            self._finish(self.todo)
        elif state is State.READY:
            self._give_up(Failure("AgentRestarted", "the agent was restarted before the rank's vote"))
        elif state is State.VOTED:
            self.done = VOTES[self.kind]
            if rebooted:  # the deadline was the former boot's; no tree is left that waits for it
                self.deadline = self.now + self.timing.frozen
            if self.kind is Kind.RELEASE and not rebooted:
                self.state = State.VOTING  # whether the claim was made before the restart is not in the journal
                self.emit(m.Claim(m.VOTED))
            else:
                self._voted()

    # ------------------------------------------------------------ orders

    def _idle_order(self, order: Order) -> None:
        if not self._led(order):
            return
        if (order.serial, order.attempt) <= (self.serial, self.attempt):
            self._answer(order, Standing.SETTLED, failure=self.failure)
        elif order.index > 0:
            failure = Failure("NotFound", "knows nothing of this operation", rank=self.rank)
            self._answer(order, Standing.ABORTED, failure=failure)
        else:
            self._accept(order)
            self._start_stage(order)

    def _accept(self, message: Order | Decided) -> None:
        self.state = State.READY
        self.op, self.serial, self.kind = message.op, message.serial, message.kind
        self.attempt, self.timing = message.attempt, message.timing
        self.begun = self.done = -1
        self.deadline = self.now + self.timing.prepared
        self.exited = self.failure = None
        self.todo = ()
        self.answers = {}
        self._armed = self._unsettled = False
        self._save()

    def _ready_order(self, order: Order) -> None:
        if not self._mine(order):
            return
        if order.index <= self.done:
            self._answer(order, Standing.DONE, order.index)
        elif follows(self.kind, self.done, order.index) and order.index <= VOTES[self.kind]:
            self._start_stage(order)

    def _busy_order(self, order: Order) -> None:
        if self._mine(order):
            standing = Standing.DONE if order.index <= self.done else Standing.BUSY
            self._answer(order, standing, order.index)

    def _start_stage(self, order: Order) -> None:
        step = PLANS[self.kind][order.index].step
        self.begun = order.index
        self._args = order.args
        if step is INTRUDES[self.kind]:
            self._save()
        if step is Step.FREEZE:
            self.deadline = self.now + self.timing.frozen
            self._await_guardian()
        else:
            self._begin(step)

    def _begin(self, step: Step) -> None:
        self.state = State.BUSY
        self._start(step, self._args)
        self._wait()

    def _await_guardian(self) -> None:
        """It is started when all is prepared, since that takes its time, and told the freeze's deadline later."""
        self.state = State.ARMING
        self._tries = 0
        self._arm()
        self._wait()

    def _arm(self) -> None:
        self._armed = self._arming = True
        self.emit(m.Arm(self.op, self.deadline, self.timing.poll))

    def _guarded(self, event: m.GuardianUp) -> None:
        if event.deadline != self.deadline:
            return  # the answer to an earlier call
        self._arming = False
        if PLANS[self.kind][self.begun].step is Step.FREEZE:
            self._begin(Step.FREEZE)
        else:
            self._stage_done()

    def _guarded_again(self, event: m.GuardianUp) -> None:
        self._arming = False

    def _unguarded(self, event: m.GuardianLost) -> None:
        """A freeze without a guardian is not begun, and goes on without one only for as long as a new one takes."""
        if not self._armed:
            return
        if self._arming and self._tries:
            self._give_up(Failure("GuardianLost", "no guardian could be started for the freeze", rank=self.rank))
        else:
            self._tries += 1
            self._arm()

    def _unguarded_finish(self, event: m.GuardianLost) -> None:
        if self._armed and not self._arming and Step.THAW in self.todo:
            self._arm()
        else:
            self._arming = False

    def _unguarded_vote(self, event: m.GuardianLost) -> None:
        self._arming = False  # tried again at the next poll

    def _start(self, step: Step, args: Mapping[str, Any]) -> None:
        self._token += 1
        limit = self.timing.limit(step)
        self.wake_at = self.now + limit + self.timing.margin  # in case that the limit is not kept
        self.emit(m.Start(step, self.op, self.attempt, args, self._token, limit))

    # ------------------------------------------------------------ a stage ends

    def _step_done(self, event: m.StepDone) -> None:
        if event.token != self._token:
            return
        self.answers[self.begun] = event.result
        if PLANS[self.kind][self.begun].step is Step.PREPARE:
            self._await_guardian()
        else:
            self._stage_done()

    def _stage_done(self) -> None:
        index, self.done = self.begun, self.begun
        if PLANS[self.kind][index].step is Step.THAW:
            self._disarm()
            self.deadline = self.now + self.timing.storing
        if index < VOTES[self.kind]:
            self.state = State.READY
            self._report(Standing.DONE, index)
            self._wait()
            return
        self.state = State.VOTING
        self.wake_at = None
        self._save()
        if self.kind is Kind.RELEASE:
            self.emit(m.Claim(m.VOTED))
        else:
            self._voted()

    def _step_failed(self, event: m.StepFailed) -> None:
        if event.token == self._token:
            self._give_up(event.failure)

    def _too_late(self, event: m.Tick) -> None:
        step = PLANS[self.kind][self.begun].step
        text = "no vote before the deadline: the coordinator is silent or a step takes too long"
        self._give_up(Failure("DeadlineExceeded", text, "", self.rank, step))

    def _tree_exited(self, event: m.TreeExited) -> None:
        self.exited = event.status
        text = f"the training ended with status {event.status}"
        self._give_up(Failure("RankExited", text, rank=self.rank, retryable=False, detail={"status": event.status}))

    def _voted_tree_exited(self, event: m.TreeExited) -> None:
        self.exited = event.status
        self._report(Standing.DONE, self.done)

    def _note_tree_exited(self, event: m.TreeExited) -> None:
        self.exited = event.status

    def _give_up(self, failure: Failure) -> None:
        """Before the vote: nothing that this rank did will ever be part of a checkpoint, or run."""
        self.failure = failure
        self._finish(undoing(self.kind, self.begun, self.done))

    # ------------------------------------------------------------ after the vote

    def _claimed(self, event: m.Fate) -> None:
        if event.value == m.VOTED:
            self._voted()
        else:
            text = "the guardian thawed the tree at its deadline"
            self._give_up(Failure("DeadlineExceeded", text, rank=self.rank, step=Step.STORE))

    def _voted(self) -> None:
        self.state = State.VOTED
        self._report(Standing.DONE, self.done)
        self.wake_at = self.now + self.timing.poll

    def _voted_order(self, order: Order) -> None:
        if not self._mine(order):
            return
        if order.record and order.record.verdict is Verdict.RESTORED:
            self._bind()
            self._bound_order(order)
        elif order.index <= self.done:
            self._answer(order, Standing.DONE, order.index)

    def _watch(self, event: m.Tick) -> None:
        """The decision is read for as long as nobody tells it, and at the deadline this rank writes one itself."""
        key = restored_key(self.op, self.attempt) if self.kind is Kind.RESTORE else decision_key(self.op)
        if self.now < self.deadline:
            self.emit(m.Read(key))
        else:
            verdict = Verdict.ABANDONED if self.kind is Kind.RESTORE else Verdict.ABORT
            text = "no decision before the rank's deadline"
            failure = Failure("DeadlineExceeded", text, rank=self.rank)
            self.emit(m.Create(key, Record(verdict, self.op, self.epoch, self.attempt, failures=(failure,))))
        self._keep_watch()

    def _watch_release(self, event: m.Tick) -> None:
        self.emit(m.Read(release_key(self.op)))
        self._keep_watch()

    def _keep_watch(self) -> None:
        self.wake_at = self.now + self.timing.poll
        if self._armed and not self._arming and self.kind is Kind.RELEASE:
            self._arm()

    def _read(self, event: m.RecordIs) -> None:
        record = event.record
        if record and record.op == self.op and record.attempt == self.attempt:
            self._obey(record)

    def _told(self, message: Decided) -> None:
        if self._mine(message):
            self._obey(message.record)

    def _told_early(self, message: Decided) -> None:
        """Before the vote only an end of it all can have been decided."""
        if self._mine(message) and message.record.verdict in (Verdict.ABORT, Verdict.ABANDONED):
            self._finish(undoing(self.kind, self.begun, self.done))

    def _obey(self, record: Record) -> None:
        match record.verdict:
            case Verdict.COMMIT if self.state is State.VOTED:
                self.state = State.COMMITTED
                self.emit(m.Read(release_key(self.op)))
            case Verdict.RESTORED if self.state is State.VOTED:
                self._bind()
            case Verdict.RELEASE:
                self._finish((Step.RELEASE,))
            case Verdict.ABORT | Verdict.CONTINUE | Verdict.ABANDONED:
                self._finish(undoing(self.kind, self.begun, self.done))

    def _idle_told(self, message: Decided) -> None:
        if not self._led(message):
            return
        if (message.serial, message.attempt) > (self.serial, self.attempt):
            # It never heard the first order, which may still come and must be refused then.
            self._accept(message)
            self._settle()
        else:
            self._answer(message, Standing.SETTLED, failure=self.failure)

    def _told_again(self, message: Decided) -> None:
        if self._mine(message):
            self._answer(message, Standing.BUSY)

    def _finishing_order(self, order: Order) -> None:
        if self._mine(order):
            self._answer(order, Standing.ABORTED, failure=self.failure)

    # ------------------------------------------------------------ restored

    def _bind(self) -> None:
        self.state = State.BOUND
        self.wake_at = None

    def _bound_order(self, order: Order) -> None:
        if not self._mine(order):
            return
        if order.index <= self.done:
            self._answer(order, Standing.DONE, order.index)
        elif self.exited is not None:
            text = f"the restored training ended with status {self.exited}"
            self._answer(order, Standing.FAILED, order.index, Failure("RankExited", text, rank=self.rank))
        elif self.failure:
            self._answer(order, Standing.FAILED, order.index, self.failure)
        elif self.begun > self.done:
            self._answer(order, Standing.BUSY, order.index)
        else:
            # A stage that comes out of turn: this rank was through those before it, and its agent was restarted.
            self.begun, self.done = order.index, order.index - 1
            self._args = order.args
            self._tries = 0
            self._try()

    def _bound_told(self, message: Decided) -> None:
        self._mine(message)  # of an attempt before this one: it is answered

    def _try(self) -> None:
        self._tries += 1
        self._start(PLANS[self.kind][self.begun].step, self._args)

    def _bound_done(self, event: m.StepDone) -> None:
        if event.token != self._token:
            return
        self.done = self.begun
        self.wake_at = None
        if self.done == len(PLANS[self.kind]) - 1:
            self._settle()
        else:
            self._report(Standing.DONE, self.done)

    def _bound_failed(self, event: m.StepFailed) -> None:
        if event.token == self._token:
            self._failed_try(event.failure)

    def _failed_try(self, failure: Failure) -> None:
        self._token += 1
        if self._tries < TRIES:
            self.wake_at = self.now + self.timing.retry
        else:
            self.failure = failure
            self.wake_at = None
            self._report(Standing.FAILED, self.begun, failure)

    def _bound_tick(self, event: m.Tick) -> None:
        if self._tries < TRIES:
            self._try()
        else:
            step = PLANS[self.kind][self.begun].step
            self._failed_try(Failure("DeadlineExceeded", "does not end", "", self.rank, step))

    # ------------------------------------------------------------ finishing

    def _finish(self, todo: tuple[Step, ...]) -> None:
        self.state = State.FINISHING
        self.todo = todo
        self._save()
        if self.failure:
            self._report(Standing.ABORTED, failure=self.failure)
        self._next()

    def _next(self) -> None:
        if self.todo:
            self._start(self.todo[0], {})
        else:
            self._settle()

    def _finish_done(self, event: m.StepDone) -> None:
        if event.token != self._token:
            return
        step, self.todo = self.todo[0], self.todo[1:]
        if step in (Step.RESTORE_DEVICES, Step.UNLOCK_DEVICES):
            self._unsettled |= bool(event.result.get("unsettled"))
        if step is Step.UNLOCK_DEVICES and self._unsettled:
            # A device call that was given up may still happen, now that the tree runs: looked at until none can.
            self._unsettled = False
            self.todo = (Step.RESTORE_DEVICES, Step.UNLOCK_DEVICES, *self.todo)
            self._later()
        else:
            self._next()

    def _finish_failed(self, event: m.StepFailed) -> None:
        if event.token == self._token:
            if self.todo[:2] == (Step.UNLOCK_NETWORK, Step.THAW):
                # A tree that runs without its peers is better off than one that is frozen.
                self.todo = (Step.THAW, Step.UNLOCK_NETWORK, *self.todo[2:])
            self._later()

    def _later(self) -> None:
        self._token += 1
        self.wake_at = self.now + self.timing.retry

    def _finish_tick(self, event: m.Tick) -> None:
        self._next()

    def _settle(self) -> None:
        self.state = State.IDLE
        self.wake_at = None
        self._disarm()
        self._save()
        self._report(Standing.SETTLED, self.done, failure=self.failure)

    def _disarm(self) -> None:
        if self._armed:
            self._armed = self._arming = False
            self.emit(m.Disarm())

    def _wait(self) -> None:
        self.wake_at = self.deadline - self.timing.margin

    TABLE: ClassVar[Mapping[tuple[Any, type], str]] = {
        (State.IDLE, m.Booted): "_booted",
        (State.IDLE, Order): "_idle_order",
        (State.IDLE, Decided): "_idle_told",
        (State.READY, Order): "_ready_order",
        (State.READY, Decided): "_told_early",
        (State.READY, m.Tick): "_too_late",
        (State.READY, m.TreeExited): "_tree_exited",
        (State.READY, m.GuardianUp): "_guarded_again",
        (State.READY, m.GuardianLost): "_unguarded",
        (State.BUSY, Order): "_busy_order",
        (State.BUSY, Decided): "_told_early",
        (State.BUSY, m.Tick): "_too_late",
        (State.BUSY, m.StepDone): "_step_done",
        (State.BUSY, m.StepFailed): "_step_failed",
        (State.BUSY, m.TreeExited): "_tree_exited",
        (State.BUSY, m.GuardianUp): "_guarded_again",
        (State.BUSY, m.GuardianLost): "_unguarded",
        (State.ARMING, Order): "_busy_order",
        (State.ARMING, Decided): "_told_early",
        (State.ARMING, m.Tick): "_too_late",
        (State.ARMING, m.GuardianUp): "_guarded",
        (State.ARMING, m.GuardianLost): "_unguarded",
        (State.ARMING, m.TreeExited): "_tree_exited",
        (State.VOTING, m.Fate): "_claimed",
        (State.VOTED, Order): "_voted_order",
        (State.VOTED, Decided): "_told",
        (State.VOTED, m.Tick): "_watch",
        (State.VOTED, m.RecordIs): "_read",
        (State.VOTED, m.TreeExited): "_voted_tree_exited",
        (State.VOTED, m.GuardianUp): "_guarded_again",
        (State.VOTED, m.GuardianLost): "_unguarded_vote",
        (State.COMMITTED, Order): "_busy_order",
        (State.COMMITTED, Decided): "_told",
        (State.COMMITTED, m.Tick): "_watch_release",
        (State.COMMITTED, m.RecordIs): "_read",
        (State.COMMITTED, m.TreeExited): "_voted_tree_exited",
        (State.COMMITTED, m.GuardianUp): "_guarded_again",
        (State.COMMITTED, m.GuardianLost): "_unguarded_vote",
        (State.BOUND, Order): "_bound_order",
        (State.BOUND, Decided): "_bound_told",
        (State.BOUND, m.Tick): "_bound_tick",
        (State.BOUND, m.StepDone): "_bound_done",
        (State.BOUND, m.StepFailed): "_bound_failed",
        (State.BOUND, m.TreeExited): "_note_tree_exited",
        (State.FINISHING, Order): "_finishing_order",
        (State.FINISHING, Decided): "_told_again",
        (State.FINISHING, m.Tick): "_finish_tick",
        (State.FINISHING, m.StepDone): "_finish_done",
        (State.FINISHING, m.StepFailed): "_finish_failed",
        (State.FINISHING, m.GuardianLost): "_unguarded_finish",
        (State.FINISHING, m.TreeExited): "_note_tree_exited",
    }
