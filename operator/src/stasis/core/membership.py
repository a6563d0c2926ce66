"""What a member knows and keeps: its state, its journal, and how it answers those who lead it, or no longer do."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from stasis.core import machine as m
from stasis.core.messages import Decided, Order, Report, Standing, coordinator_address
from stasis.core.plan import INTRUDES, PLANS, VOTES, Kind, Timing
from stasis.core.records import Failure
from stasis.core.steps import Step


class State(StrEnum):
    IDLE = "idle"  # takes part in nothing; what it took part in last is settled
    READY = "ready"  # through a stage, may give up
    BUSY = "busy"  # in a stage, may give up
    ARMING = "arming"  # waits for its guardian: to stand by once all is prepared, to hold the freeze
    VOTING = "voting"  # is complete; claims the freeze's fate before it says so
    VOTED = "voted"  # bound by the decision
    COMMITTED = "committed"  # has read Commit; bound by Release or Continue
    BOUND = "bound"  # has read Restored: goes forward only
    FINISHING = "finishing"  # carries out what was decided, or its own giving up; tries each step until it succeeds


# What a restarted agent is to find, where that is another state than the one that is left.
_JOURNALED = {
    State.BUSY: State.READY,
    State.ARMING: State.READY,
    State.VOTING: State.VOTED,
    State.COMMITTED: State.VOTED,
    State.BOUND: State.VOTED,
}


class Membership(m.Machine[State]):
    """The journal is written before anything that must be undone is begun, before the vote is told, and before the
    undoing; never between the freeze and the capture, where time is dear."""

    def __init__(self, rank: int) -> None:
        super().__init__(State.IDLE)
        self.rank = rank
        self.boot = ""
        self.epoch = 0
        self.serial = 0
        self.op = ""
        self.kind = Kind.RELEASE
        self.attempt = 0
        self.timing = Timing()
        self.begun = -1  # the last stage that may have had effects
        self.done = -1  # the last stage that this rank is through
        self.deadline = 0.0  # to vote by; on this host's clock
        self.exited: int | None = None
        self.failure: Failure | None = None
        self.todo: tuple[Step, ...] = ()
        self.answers: dict[int, Mapping[str, Any]] = {}  # what the stages returned
        self._args: Mapping[str, Any] = {}
        self._token = 0
        self._armed = False
        self._arming = False
        self._tries = 0
        self._unsettled = False

    # ------------------------------------------------------------ journal

    def _save(self) -> None:
        plan, intrudes = PLANS[self.kind], INTRUDES[self.kind]
        intruded = any(stage.step is intrudes for stage in plan[: self.begun + 1])
        journal = {
            "state": str(_JOURNALED.get(self.state, self.state)),
            "boot": self.boot,
            "epoch": self.epoch,
            "serial": self.serial,
            "op": self.op,
            "kind": str(self.kind),
            "attempt": self.attempt,
            "timing": self.timing.to_dict(),
            "begun": VOTES[self.kind] if intruded else self.begun,  # not written again up to the vote
            "deadline": self.deadline,
            "exited": self.exited,
            "failure": self.failure.to_dict() if self.failure else None,
            "todo": [str(step) for step in self.todo],
            "answers": {str(index): dict(answer) for index, answer in self.answers.items()},
        }
        self.emit(m.Save(journal))

    def _load(self, saved: Mapping[str, Any]) -> State:
        """Take the journal over; the state that it was left in."""
        self.epoch, self.serial, self.op = saved["epoch"], saved["serial"], saved["op"]
        self.kind, self.attempt = Kind(saved["kind"]), saved["attempt"]
        self.timing = Timing.from_dict(saved["timing"])
        self.begun, self.deadline, self.exited = saved["begun"], saved["deadline"], saved["exited"]
        self.failure = Failure.from_dict(saved["failure"]) if saved["failure"] else None
        self.todo = tuple(map(Step, saved["todo"]))
        self.answers = {int(index): answer for index, answer in saved["answers"].items()}
        return State(saved["state"])

    # ------------------------------------------------------------ whom it obeys, what it answers

    def _mine(self, message: Order | Decided) -> bool:
        """Whether the message is from a leader and about what this member takes part in; answers it if not."""
        if not self._led(message):
            return False
        theirs, mine = (message.serial, message.attempt), (self.serial, self.attempt)
        if theirs < mine:
            self._answer(message, Standing.SETTLED)
        elif theirs > mine and isinstance(message, Decided):
            self._answer(message, Standing.SETTLED)  # it took no part
        elif theirs > mine:
            text = f"takes part in operation {self.op}"
            self._answer(message, Standing.ABORTED, failure=Failure("Busy", text, rank=self.rank))
        return theirs == mine

    def _led(self, message: Order | Decided) -> bool:
        if message.epoch < self.epoch:
            self._answer(message, Standing.STALE)
            return False
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            self._save()
        return True

    def _answer(
        self, message: Order | Decided, standing: Standing, index: int = -1, failure: Failure | None = None
    ) -> None:
        mine = (message.serial, message.attempt) == (self.serial, self.attempt)
        result = self.answers.get(index, {}) if mine and standing is Standing.DONE else {}
        report = Report(
            message.op,
            message.attempt,
            self.rank,
            self.epoch,
            standing,
            index,
            result,
            failure,
            self.exited if mine else None,
        )
        self.emit(m.Send(coordinator_address(message.op, message.epoch), report))

    def _report(self, standing: Standing, index: int = -1, failure: Failure | None = None) -> None:
        result = self.answers.get(index, {}) if standing is Standing.DONE else {}
        report = Report(self.op, self.attempt, self.rank, self.epoch, standing, index, result, failure, self.exited)
        self.emit(m.Send(coordinator_address(self.op, self.epoch), report))
