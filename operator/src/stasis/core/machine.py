"""Events, effects, and the base of the protocol's machines.

A machine takes an event and the time, and returns effects; it does nothing else, so it runs the same in a process, in
a simulation and in a debugger. `now` is CLOCK_BOOTTIME of the machine's own host, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from stasis.core.messages import Decided, Message, Order, Report
from stasis.core.plan import Outcome, Stage
from stasis.core.records import Failure, Record
from stasis.core.steps import Step

# ---------------------------------------------------------------- events (messages are events too)


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a coordinator, also of one that takes an operation over."""


@dataclass(frozen=True, slots=True)
class Booted:
    """First event of a member: what its journal holds, what became of its guardian, and the host's boot id."""

    journal: Mapping[str, Any] | None
    fate: str | None
    boot: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that the machine asked for by `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class StepDone:
    token: int
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepFailed:
    token: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class TreeExited:
    """The rank's tree ended by itself: 0, or 128 + signal, or its exit code; -1 where nobody can know."""

    status: int


@dataclass(frozen=True, slots=True)
class GuardianUp:
    """The guardian is there and holds this deadline."""

    deadline: float


@dataclass(frozen=True, slots=True)
class GuardianLost:
    """The guardian could not be started, does not hold what it was told to, or died."""


@dataclass(frozen=True, slots=True)
class Rearmed:
    """To a guardian: its agent has it hold this deadline from now on."""

    deadline: float


VOTED, FIRED = "voted", "fired"


@dataclass(frozen=True, slots=True)
class Fate:
    """Answer to Claim and Look: which of `VOTED` and `FIRED` was claimed first for this freeze, None if none yet."""

    value: str | None


@dataclass(frozen=True, slots=True)
class Rescued:
    """Answer to Rescue."""

    ok: bool


@dataclass(frozen=True, slots=True)
class RecordIs:
    """Answer to Create and Read: the record that is there now, None if none is."""

    key: str
    record: Record | None


@dataclass(frozen=True, slots=True)
class RecordsDown:
    """Create or Read could not be answered; a Create may have taken effect all the same."""

    key: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The caller no longer wants the operation; heeded until Release or Restored is recorded."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The caller knows that this rank's container is gone for ever: nothing of it runs, nobody will answer for it."""

    rank: int


Event = (
    Started | Booted | Tick | StepDone | StepFailed | TreeExited | GuardianUp | GuardianLost | Rearmed | Fate
    | Rescued | RecordIs | RecordsDown | Withdraw | Lost | Order | Decided | Report
)  # fmt: skip

# ---------------------------------------------------------------- effects, carried out in the order in which they come


@dataclass(frozen=True, slots=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Create:
    """Write the record unless there is one; answered by RecordIs or RecordsDown."""

    key: str
    record: Record


@dataclass(frozen=True, slots=True)
class Read:
    key: str


@dataclass(frozen=True, slots=True)
class Start:
    """Carry a step out and answer StepDone or StepFailed with `token`, within `limit` seconds.

    A step that still runs is given up first: its child is killed, and its answer, if it comes, is ignored.
    """

    step: Step
    op: str
    attempt: int
    args: Mapping[str, Any]
    token: int
    limit: float


@dataclass(frozen=True, slots=True)
class Save:
    """Make this the member's journal, durably, before any later effect."""

    journal: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arm:
    """Have a guardian hold this deadline; answered by GuardianUp or GuardianLost. One that lives stays."""

    op: str
    deadline: float
    poll: float


@dataclass(frozen=True, slots=True)
class Disarm:
    """End the guardian; when this returns it does nothing more."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Decide the freeze's fate unless it is decided: atomic between agent and guardian. Answered by Fate."""

    value: str


@dataclass(frozen=True, slots=True)
class Look:
    """Answered by Fate."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """The guardian's: unlock the network, then thaw; answered by Rescued."""


@dataclass(frozen=True, slots=True)
class StageBegun:
    """For the caller's eyes: all ranks were ordered through this stage."""

    stage: Stage
    attempt: int


@dataclass(frozen=True, slots=True)
class StageDone:
    """For the caller's eyes: all ranks are through it, with these results."""

    stage: Stage
    attempt: int
    results: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """For the caller's eyes."""

    record: Record


@dataclass(frozen=True, slots=True)
class Ended:
    """The coordinator's last effect. `exited`: ranks whose trees ended by themselves, with the exit status (-1: it is
    unknown). Where all of them ended with 0, the caller waits a while for the others to end, and then tries again with
    these as `Spec.finished`."""

    outcome: Outcome
    failures: tuple[Failure, ...] = ()
    exited: Mapping[int, int] = field(default_factory=dict)


Notice = StageBegun | StageDone | Recorded | Ended
Effect = Send | Create | Read | Start | Save | Arm | Disarm | Claim | Look | Rescue | Notice

# ---------------------------------------------------------------- base

S = TypeVar("S", bound=StrEnum)


class Machine(Generic[S]):
    """A table of handlers by state and event. A pair that the table does not name is without effect."""

    TABLE: ClassVar[Mapping[tuple[Any, type], str]] = {}

    def __init__(self, state: S) -> None:
        self.state = state
        self.now = 0.0
        self.wake_at: float | None = None  # when it wants a Tick
        self._effects: list[Effect] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of `event` at `now`. The machine is in its next state when this returns."""
        self.now = now
        name = self.TABLE.get((self.state, type(event)))
        if name is not None:
            handler: Callable[[Any], None] = getattr(self, name)
            handler(event)
        effects, self._effects = self._effects, []
        return effects

    def emit(self, *effects: Effect) -> None:
        self._effects.extend(effects)
