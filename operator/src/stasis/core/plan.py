"""What an operation is and which steps it takes, in order: the tables that coordinator and members share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from stasis.core.steps import Step
from stasis.errors import UsageError


class Kind(StrEnum):
    RELEASE = "release"  # checkpoint, then kill the ranks
    CONTINUE = "continue"  # checkpoint, and the ranks go on
    RESTORE = "restore"


class Outcome(StrEnum):
    """How an operation ended."""

    RELEASED = "released"
    CONTINUED = "continued"
    ABORTED = "aborted"  # of a checkpoint: the ranks run as if nothing had been asked
    RESTORED = "restored"
    BROKEN = "broken"  # restored, and then some rank failed: as any running gang that loses a rank
    ABANDONED = "abandoned"  # of a restore: nothing is left of it, and its checkpoint is as before
    SUPERSEDED = "superseded"  # this coordinator is no longer the leader; the operation goes on without it


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds of CLOCK_BOOTTIME."""

    prepared: float = 600.0  # a rank's time from its first step to the freeze, or to the restore's vote
    frozen: float = 900.0  # from the freeze to its vote or its thaw
    storing: float = 7200.0  # from the thaw to the vote, of a checkpoint that goes on
    margin: float = 5.0  # an agent gives up this much before its guardian acts
    resend: float = 1.0  # an unanswered message is sent again
    poll: float = 5.0  # a record that is waited for is read again
    retry: float = 1.0  # what must succeed and failed is tried again
    step: float = 300.0  # a step's limit; `limits` holds others by step
    limits: Mapping[str, float] = field(default_factory=lambda: {Step.UNLOCK_NETWORK: 30.0, Step.THAW: 30.0})
    lease: float = 15.0  # of the leader
    takeover: float = 10.0  # from a lease's end to the next leader's first command

    def limit(self, step: Step) -> float:
        return self.limits.get(step, self.step)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return data | {"limits": dict(self.limits)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timing:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Spec:
    """An operation, as its caller describes it once and durably; with its records all that a new coordinator needs.

    `serial` grows with every operation of a gang. `args` are JSON: step -> rank (as text) or "*" -> arguments.
    """

    op: str  # its name; a checkpoint's is its UID
    serial: int
    kind: Kind
    ranks: tuple[int, ...]
    finished: tuple[int, ...] = ()
    args: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    checkpoint: str = ""  # of a restore: the checkpoint's operation
    requires: tuple[str, ...] = ()  # operations of whose trees none may be left before the first step of a restore
    attempts: int = 3  # of a restore

    def __post_init__(self) -> None:
        timing = self.timing
        if not self.ranks:
            raise UsageError(f"operation {self.op}: no ranks")
        if (self.kind is Kind.RESTORE) != bool(self.checkpoint):
            raise UsageError(f"operation {self.op}: a restore, and nothing else, names its checkpoint")
        if self.serial < 1 or self.attempts < 1:
            raise UsageError(f"operation {self.op}: serial and attempts start at 1")
        if min(timing.prepared, timing.storing) <= timing.margin:
            raise UsageError(f"operation {self.op}: a deadline is shorter than the margin ({timing.margin} s)")
        if timing.frozen - timing.margin <= timing.lease + timing.takeover:
            raise UsageError(
                f"operation {self.op}: the freeze deadline ({timing.frozen} s, less {timing.margin} s) is not longer"
                f" than lease and takeover ({timing.lease} s + {timing.takeover} s)",
                remedy="a longer freeze deadline",
            )

    def args_for(self, step: Step, rank: int) -> dict[str, Any]:
        of_step = self.args.get(step)
        return {**of_step.get("*", {}), **of_step.get(str(rank), {})} if of_step else {}

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        return data | {"kind": str(self.kind), **{k: list(data[k]) for k in ("ranks", "finished", "requires")}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spec:
        tuples = {key: tuple(data[key]) for key in ("ranks", "finished", "requires")}
        return cls(**{**data, **tuples, "kind": Kind(data["kind"]), "timing": Timing.from_dict(data["timing"])})


class Stage(NamedTuple):
    """One place in a plan: every rank is through it before any rank begins the next."""

    step: Step
    round: int = 1


ROUNDS = 3  # draining and locking, until nothing is in flight; what still is then, the mended images make good

_DRAIN = tuple(
    Stage(step, n)
    for n in range(1, ROUNDS + 1)
    for step in (Step.DRAIN, Step.LOCK_NETWORK, Step.UNLOCK_NETWORK)
    if (step, n) != (Step.UNLOCK_NETWORK, ROUNDS)
)
_CAPTURE = (
    *map(Stage, (Step.PREPARE, Step.QUIESCE, Step.LOCK_DEVICES, Step.SAVE_DEVICES, Step.FREEZE)),
    *_DRAIN,
    Stage(Step.CAPTURE),
    Stage(Step.UNLOCK_NETWORK, ROUNDS + 1),
)
_WAKE = tuple(map(Stage, (Step.THAW, Step.RESTORE_DEVICES, Step.UNLOCK_DEVICES, Step.REBUILD)))

PLANS: Mapping[Kind, tuple[Stage, ...]] = {
    Kind.RELEASE: (*_CAPTURE, Stage(Step.STORE)),
    Kind.CONTINUE: (*_CAPTURE, *_WAKE, Stage(Step.STORE)),
    Kind.RESTORE: (
        *map(Stage, (Step.PLACE, Step.LAY, Step.RESTORE, Step.RELEASE_NETWORK, Step.POKE_NETWORK)),
        *_WAKE,
    ),
}
CAPTURE_INDEX = PLANS[Kind.RELEASE].index(Stage(Step.CAPTURE))

# A rank votes by its success at this stage. What a plan has after it is done only when the records say so.
VOTES: Mapping[Kind, int] = {
    Kind.RELEASE: PLANS[Kind.RELEASE].index(Stage(Step.STORE)),
    Kind.CONTINUE: PLANS[Kind.CONTINUE].index(Stage(Step.STORE)),
    Kind.RESTORE: PLANS[Kind.RESTORE].index(Stage(Step.POKE_NETWORK)),
}

# The first step that a running trainer notices, or that leaves something behind in a placeholder.
INTRUDES: Mapping[Kind, Step] = {Kind.RELEASE: Step.QUIESCE, Kind.CONTINUE: Step.QUIESCE, Kind.RESTORE: Step.LAY}

# What undoes what, in the order in which it is undone: the network before the thaw, the devices after it, since a
# device call hangs on a frozen process.
_COUNTERPARTS = (
    (Step.LOCK_NETWORK, Step.UNLOCK_NETWORK),
    (Step.FREEZE, Step.THAW),
    (Step.SAVE_DEVICES, Step.RESTORE_DEVICES),
    (Step.LOCK_DEVICES, Step.UNLOCK_DEVICES),
    (Step.QUIESCE, Step.REBUILD),
)


def follows(kind: Kind, done: int, index: int) -> bool:
    """Whether a rank that is through stage `done` (-1: none) may begin `index`: the next one, or the capture where
    nothing was in flight after a lock."""
    if index == done + 1:
        return True
    return kind is not Kind.RESTORE and index == CAPTURE_INDEX and PLANS[kind][done].step is Step.LOCK_NETWORK


def after(kind: Kind, index: int, *, in_flight: bool) -> int:
    """The stage that follows `index` when every rank is through it."""
    if PLANS[kind][index].step is Step.LOCK_NETWORK and not in_flight:
        return CAPTURE_INDEX
    return index + 1


@cache
def undoing(kind: Kind, begun: int, done: int) -> tuple[Step, ...]:
    """The steps that let a rank go on which has begun the stages up to `begun` and is through those up to `done`:
    each only if its counterpart may have begun. The last one forgets what was captured or reserved."""
    if kind is Kind.RESTORE:
        return (Step.TEAR_DOWN,)
    steps = [stage.step for stage in PLANS[kind]]
    undo = []
    for do, counterpart in _COUNTERPARTS:
        began = max((i for i in range(begun + 1) if steps[i] is do), default=None)
        if began is not None and counterpart not in steps[began + 1 : done + 1]:
            undo.append(counterpart)
    return (*undo, Step.CONTINUE)
