"""What the controller sees of one TrainJob: the input of `decide`, without anything of the API's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from stasis.core.gate import Gate, Open
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Verdict


class Incarnation(NamedTuple):
    """Which restore a placeholder waits for: the checkpoint's UID, and the restore's serial."""

    checkpoint: str
    generation: int


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of the JobSet. Those of the ranks are numbered; `running`: its checkpointed container runs."""

    rank: int
    name: str
    uid: str
    running: bool = False
    succeeded: bool = False
    failed: bool = False
    terminating: bool = False
    incarnation: Incarnation | None = None  # None: it is no placeholder
    told: bool = False  # a placeholder that was told to run its command
    node: str = ""
    unready_since: float = 0.0  # since when its node is not ready, in seconds of the wall clock; 0 for one that is
    lost: bool = False  # with its node: see `core.lost`


class Choice(NamedTuple):
    """From which checkpoint its user wants a suspended job to be resumed, in place of which; "" where that is none, or
    no name."""

    checkpoint: str
    current: str


@dataclass(frozen=True, slots=True)
class Job:
    """The TrainJob. `since`: when it was last asked to be suspended, in seconds of the wall clock; `check`: the name of
    a preflight that was asked for and not answered."""

    uid: str
    suspend: bool
    generation: int = 0
    since: float = 0.0
    deleting: bool = False
    finished: bool = False
    discard: bool = False
    check: str = ""
    choice: Choice | None = None
    told: bool = False  # of the checkpoints of jobs before it under its name


@dataclass(frozen=True, slots=True)
class JobSet:
    """`incarnation`: of the pods that are made from now on. `restoring`: the last restore that began in its pods."""

    suspend: bool
    ranks: int
    gate: Gate = field(default_factory=Open)
    incarnation: Incarnation | None = None
    restoring: int = 0
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as it is recorded. `pods`: rank -> UID of the pod that it is about."""

    op: str
    serial: int
    kind: Kind
    pods: Mapping[int, str]
    verdicts: frozenset[Verdict] = frozenset()
    outcome: Outcome | None = None  # by the record of its end
    concluded: bool = False  # what its end asks for is done

    @property
    def under_way(self) -> bool:
        return self.outcome is None


class Use(StrEnum):
    """What became of a committed checkpoint."""

    UNUSED = "unused"
    RESTORED = "restored"  # the training goes on from it
    FRESH = "fresh"  # it was given up: the training began anew
    FAILED = "failed"  # it could not be restored; it waits for the user
    CHOSEN = "chosen"  # the user wants the job to be resumed from it
    PASSED = "passed"  # the user wants the job to be resumed from another one


@dataclass(frozen=True, slots=True)
class Failed:
    """There never will be a checkpoint. `at`: seconds of the wall clock; `refused`: the program stands against it."""

    at: float
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A TrainJobCheckpoint. `seen`: the TrainJob's generation when it failed to be restored."""

    name: str
    uid: str
    job: str  # UID of its TrainJob
    kind: Kind
    serial: int = 0
    operation: Operation | None = None  # that makes it
    restore: Operation | None = None  # the last one
    failed: Failed | None = None
    published: bool = False  # its tag is in the registry
    use: Use = Use.UNUSED
    seen: int = 0
    deleting: bool = False
    completed_at: float = 0.0  # or failed; seconds of the wall clock
    orphaned_at: float = 0.0  # when it was seen that its job is gone
    size: int = 0  # bytes that are stored
    policy: str = ""  # name of the one that it was made under
    lost: bool = False  # its bytes are gone, or on their way
    imported: bool = False  # made elsewhere
    fork_of: str = ""  # a copy of this one, of another job
    local: bool = False  # its bytes are on the disks of its nodes, and not all of them in the registry yet

    @property
    def settled(self) -> bool:
        """Nothing is done for it any more, and it is not on its way out."""
        ended = bool(self.operations or self.failed) and all(operation.concluded for operation in self.operations)
        return ended and not self.deleting

    @property
    def waiting(self) -> bool:
        """Neither begun nor given up, and not to be filled in by whoever made it."""
        return self.operation is None and self.failed is None and not self.imported and not self.fork_of

    @property
    def released(self) -> bool:
        """The ranks of its job have stopped in it."""
        outcome = self.operation.outcome if self.operation else None
        return outcome is Outcome.RELEASED and not self.imported and not self.deleting

    @property
    def stands(self) -> bool:
        """A job that is resumed begins from it. One that the ranks did not stop in has to be chosen for that."""
        if self.use in (Use.CHOSEN, Use.FAILED):
            return self.operation is not None and not self.deleting
        return self.released and self.use is Use.UNUSED

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(operation for operation in (self.operation, self.restore) if operation)


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds. `keep`: how many of a job; `ttl`: for how long, None for ever."""

    keep: int = 3
    ttl: float | None = None
    delete_with_job: bool = False
    ttl_after_delete: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Policy:
    """`timeout`: how long a suspend is held back, `lost_after`: how long a node may not be ready, in seconds. What
    cannot be checkpointed runs on, or is suspended without (`suspend_anyway`); what cannot be restored waits, or begins
    anew (`start_fresh`)."""

    timeout: float = 900.0
    lost_after: float = 120.0
    suspend_anyway: bool = False
    start_fresh: bool = False
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class View:
    """All of one (namespace, TrainJob name) at one time. `checkpoints` are in the order of their serials, those that
    have none yet last; also of jobs before this one under its name."""

    now: float  # seconds of the wall clock
    job: Job | None = None
    jobset: JobSet | None = None
    pods: tuple[Pod, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    policy: Policy = field(default_factory=Policy)
