"""What `decide` asks for. Each action is idempotent, and refused by the API server where the view was out of date."""

from __future__ import annotations

from dataclasses import dataclass

from stasis.core.gate import Gate
from stasis.core.plan import Kind
from stasis.core.view import Pod


@dataclass(frozen=True, slots=True)
class Drive:
    """The operation is under way: see that a coordinator leads it. `lost`: ranks whose pods are gone for ever."""

    checkpoint: str
    op: str
    withdraw: bool = False
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conclude:
    """The operation's end is recorded: do what it asks for, and say so in the status."""

    checkpoint: str
    op: str


@dataclass(frozen=True, slots=True)
class Create:
    """A TrainJobCheckpoint, for a suspend."""

    serial: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Describe the checkpoint's operation: the gang runs as `pods`; `finished` ranks have ended with 0."""

    checkpoint: str
    serial: int
    kind: Kind
    pods: tuple[Pod, ...]
    finished: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BeginRestore:
    """Describe a restore of the checkpoint in these placeholders."""

    checkpoint: str
    serial: int
    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class SetGate:
    """`reason` and `message` are for the user; empty where an earlier event says it."""

    gate: Gate
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Write to the JobSet that this restore begins: what a controller that saw less would write to it is refused."""

    generation: int


@dataclass(frozen=True, slots=True)
class OpenResume:
    """See that the checkpoint can be restored, and let its JobSet be resumed as this restore."""

    checkpoint: str
    generation: int


@dataclass(frozen=True, slots=True)
class Fail:
    """There never will be a checkpoint of this name. `reason`: of the condition and the event."""

    checkpoint: str
    message: str
    reason: str = "NotTaken"


@dataclass(frozen=True, slots=True)
class Publish:
    """Point the checkpoint's tag to it, and say in the status what is stored."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class StartFresh:
    """Give the checkpoint up: its placeholders are to begin anew."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Word:
    """Tell placeholders that wait for nothing any more to run their command."""

    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class Orphan:
    """Note at the checkpoint that its job is gone, and since when."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Expire:
    """The checkpoint is no longer kept: delete it."""

    checkpoint: str
    message: str


@dataclass(frozen=True, slots=True)
class Choose:
    """The job is to be resumed from this one of its checkpoints."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class GoBack:
    """Ranks of the gang are lost, and no newer checkpoint can be made: all of them are to go back to this one."""

    checkpoint: str
    lost: str  # in words


@dataclass(frozen=True, slots=True)
class PassOver:
    """The job is not to be resumed from this one, but from `chosen`."""

    checkpoint: str
    chosen: str


@dataclass(frozen=True, slots=True)
class Fork:
    """Make a checkpoint of the job's own, chosen, of another job's checkpoint `origin`."""

    origin: str
    serial: int


@dataclass(frozen=True, slots=True)
class RefuseChoice:
    """Tell the user, once, why the job is not resumed from the checkpoint of his choice."""

    message: str


@dataclass(frozen=True, slots=True)
class TellNamesakes:
    """Tell the user, once, that the job starts anew though a job before it under its name has these checkpoints."""

    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the user, once, what the job waits for."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Check:
    """Tell the user what stands against a checkpoint of the job as it runs now."""

    nonce: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """The checkpoint is being deleted, and nothing needs it: remove what is stored, then the finalizer."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Upload:
    """See that what is on the nodes' disks alone comes to the registry, and how far it is."""

    checkpoint: str


Action = (
    Drive | Conclude | Create | Begin | BeginRestore | SetGate | Mark | OpenResume | Fail | Publish | StartFresh
    | Word | Orphan | Expire | LetGo | Check | Choose | GoBack | PassOver | Fork | RefuseChoice
    | TellNamesakes | Upload | Tell
)  # fmt: skip
