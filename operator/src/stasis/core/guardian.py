"""The guardian of one freeze, for when the agent cannot: unlocks and thaws at the deadline, or as recorded.

It stands by from the preparation on and holds that one's deadline until it is told the freeze's.

Standard library only: it runs in a process of its own that must be small and must not fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

from stasis.core import machine as m
from stasis.core.records import Record, Verdict, decision_key, release_key


class Duty(StrEnum):
    """What a guardian is to do now."""

    WAIT = "wait"
    RESCUE = "rescue"  # unlock the network, thaw
    LEAVE = "leave"  # the tree is to be killed; that is not the guardian's to do


def duty(now: float, deadline: float, *, voted: bool, decision: Record | None, release: Record | None) -> Duty:
    """Before the rank's vote its deadline counts and nothing else; after it the records and nothing else."""
    if not voted:
        return Duty.RESCUE if now >= deadline else Duty.WAIT
    if release is not None:
        return Duty.RESCUE if release.verdict is Verdict.CONTINUE else Duty.LEAVE
    return Duty.RESCUE if decision is not None and decision.verdict is Verdict.ABORT else Duty.WAIT


class State(StrEnum):
    WATCHING = "watching"
    RESCUING = "rescuing"  # until it succeeds; at a missed deadline, until the agent ends this guardian
    GONE = "gone"


RETRY = 0.5  # seconds between two tries of a rescue


class Guardian(m.Machine[State]):
    """Its first event is a Tick. `deadline` is CLOCK_BOOTTIME; records and claim are looked at every `poll` seconds."""

    def __init__(self, op: str, deadline: float, poll: float) -> None:
        super().__init__(State.WATCHING)
        self.op = op
        self.deadline = deadline
        self.poll = poll
        self.wake_at = 0.0
        self._voted = False
        self._decision: Record | None = None
        self._release: Record | None = None

    def _tick(self, event: m.Tick) -> None:
        self.wake_at = self.now + self.poll
        if not self._voted:
            if self.now >= self.deadline:
                self.emit(m.Claim(m.FIRED))
            else:
                self.wake_at = min(self.wake_at, self.deadline)
                self.emit(m.Look())
        elif self._decision is None:
            self.emit(m.Read(decision_key(self.op)))
        else:
            self.emit(m.Read(release_key(self.op)))

    def _rearmed(self, event: m.Rearmed) -> None:
        self.deadline = event.deadline
        self.wake_at = self.now

    def _fate(self, event: m.Fate) -> None:
        self._voted = event.value == m.VOTED
        if event.value == m.FIRED:
            self._rescue()

    def _record(self, event: m.RecordIs) -> None:
        if event.key == decision_key(self.op):
            self._decision = event.record
        else:
            self._release = event.record
        match duty(self.now, self.deadline, voted=True, decision=self._decision, release=self._release):
            case Duty.RESCUE:
                self._rescue()
            case Duty.LEAVE:
                self._leave()

    def _rescue(self, event: m.Tick | None = None) -> None:
        self.state = State.RESCUING
        self.emit(m.Rescue())

    def _rescued(self, event: m.Rescued) -> None:
        if not event.ok:
            self.wake_at = self.now + RETRY
        elif self._voted:
            self._leave()
        else:
            # An agent that was stopped for long may be about to freeze the tree, unaware. This stays until it is ended.
            self.wake_at = self.now + self.poll

    def _leave(self) -> None:
        self.state = State.GONE
        self.wake_at = None

    TABLE: ClassVar[Mapping[tuple[Any, type], str]] = {
        (State.WATCHING, m.Tick): "_tick",
        (State.WATCHING, m.Rearmed): "_rearmed",
        (State.WATCHING, m.Fate): "_fate",
        (State.WATCHING, m.RecordIs): "_record",
        (State.RESCUING, m.Rescued): "_rescued",
        (State.RESCUING, m.Tick): "_rescue",
    }
