"""The gate between TrainJob.spec.suspend and JobSet.spec.suspend: what each write to a JobSet may do.

Its state is one annotation of the JobSet, written by the controller, and by the admission of the very write that it
lets pass. So admission is a pure function, and whatever is repeated, late or reordered finds the state as it is:

    (absent)           running, or not suspended by us. A suspend is put back, until the controller has saved the gang.
    suspend/NAME       may be suspended, and then is held: saved as checkpoint NAME
    suspend/-          may be suspended, and started again as if for the first time: nothing was saved
    held/NAME          suspended, and stays so whatever is written
    resume/NAME/STAMP  may be resumed from NAME; STAMP is JSON, for the pods. `resume/-`: without a restore

    absent -> suspend/NAME -> held/NAME -> resume/NAME/STAMP -> absent
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stasis.api.names import ADDRESSES, CHECKPOINT, CHECKPOINT_UID, CONTAINER, INITS, RESTORE
from stasis.errors import UsageError

NOTHING = "-"  # in place of a checkpoint's name
STAMPS = (CHECKPOINT, CHECKPOINT_UID, RESTORE, ADDRESSES, INITS, CONTAINER)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the pods of a resume are told: which restore they are the placeholders of."""

    checkpoint: str
    uid: str
    generation: int  # of the restore, from 1; grows with each resume
    addresses: Mapping[int, str] = field(default_factory=dict)  # rank -> what the CNI is asked for, by comma
    inits: tuple[str, ...] = ()  # builds of init that the restore needs
    container: str = ""

    def annotations(self) -> dict[str, str]:
        """For the pod templates: all of STAMPS, empty where there is nothing to say."""
        return {
            CHECKPOINT: self.checkpoint,
            CHECKPOINT_UID: self.uid,
            RESTORE: str(self.generation),
            ADDRESSES: _json({str(rank): ip for rank, ip in self.addresses.items()}) if self.addresses else "",
            INITS: _json(list(self.inits)) if self.inits else "",
            CONTAINER: self.container,
        }

    @classmethod
    def of(cls, annotations: Mapping[str, str]) -> Stamp | None:
        """The stamp of a pod; None where it has none. Raises UsageError for one that is not understood."""
        if not annotations.get(CHECKPOINT):
            return None
        return _stamp(
            annotations[CHECKPOINT],
            {
                "uid": annotations.get(CHECKPOINT_UID, ""),
                "generation": annotations.get(RESTORE, ""),
                "addresses": _load(annotations.get(ADDRESSES) or "{}"),
                "inits": _load(annotations.get(INITS) or "[]"),
                "container": annotations.get(CONTAINER, ""),
            },
        )


UNSTAMPED: Mapping[str, str] = dict.fromkeys(STAMPS, "")


@dataclass(frozen=True, slots=True)
class Open:
    def __str__(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Suspend:
    """`checkpoint` "" where nothing was saved."""

    checkpoint: str = ""

    def __str__(self) -> str:
        return f"suspend/{self.checkpoint or NOTHING}"


@dataclass(frozen=True, slots=True)
class Held:
    checkpoint: str

    def __str__(self) -> str:
        return f"held/{self.checkpoint}"


@dataclass(frozen=True, slots=True)
class Resume:
    """`stamp` None for a fresh start."""

    stamp: Stamp | None = None

    def __str__(self) -> str:
        if self.stamp is None:
            return f"resume/{NOTHING}"
        stamp = self.stamp
        content: dict[str, Any] = {"uid": stamp.uid, "generation": stamp.generation}
        if stamp.addresses:
            content["addresses"] = {str(rank): ip for rank, ip in stamp.addresses.items()}
        if stamp.inits:
            content["inits"] = list(stamp.inits)
        if stamp.container:
            content["container"] = stamp.container
        return f"resume/{stamp.checkpoint}/{_json(content)}"


Gate = Open | Suspend | Held | Resume


def parse_gate(text: str) -> Gate:
    """The gate of an annotation's value. Raises UsageError for one that is not understood."""
    state, _, rest = text.partition("/")
    name, slash, content = rest.partition("/")
    match state:
        case "" if not rest:
            return Open()
        case "suspend" if name and not slash:
            return Suspend("" if name == NOTHING else name)
        case "held" if name not in ("", NOTHING) and not slash:
            return Held(name)
        case "resume" if name == NOTHING and not slash:
            return Resume()
        case "resume" if name not in ("", NOTHING):
            return Resume(_stamp(name, _load(content)))
    raise UsageError(f"{text!r:.200} is no state of the gate", remedy="leave the annotation to the controller")


@dataclass(frozen=True, slots=True)
class Admitted:
    """What becomes of a write."""

    suspend: bool
    gate: Gate
    stamps: Mapping[str, str] | None = None  # annotations for the pod templates; None: they stay as they are
    deferred: bool = False


def admit(gate: Gate, *, was: bool, wanted: bool) -> Admitted:
    """`was` and `wanted`: spec.suspend before the write and in it; `gate` as the write has it.

    Admitting once more what was admitted changes nothing: the API server may ask again within one write.
    """
    suspended = was or wanted
    match gate:
        case Held():
            return Admitted(True, gate)
        case Suspend("") if wanted:
            return Admitted(True, gate, UNSTAMPED)  # from where the next start passes as the first one did
        case Suspend(name) if name and suspended:
            return Admitted(True, Held(name))
        case Suspend() if not suspended:
            return Admitted(False, gate)
        case Resume(stamp) if was:
            if wanted:
                return Admitted(True, gate)
            return Admitted(False, Open(), UNSTAMPED if stamp is None else stamp.annotations())
    # Open, or what has nothing left to say.
    deferred = wanted and not was
    return Admitted(wanted and not deferred, Open(), deferred=deferred)


def _stamp(name: str, content: Any) -> Stamp:
    try:
        stamp = Stamp(
            name,
            str(content["uid"]),
            int(content["generation"]),
            {int(rank): str(ip) for rank, ip in content.get("addresses", {}).items()},
            tuple(str(build) for build in content.get("inits", ())),
            str(content.get("container", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the stamp of a resume from {name} is not understood: {error!r:.200}") from None
    if stamp.generation < 1 or not stamp.uid:
        raise UsageError(f"the stamp of a resume from {name} lacks the checkpoint's UID or the restore's generation")
    return stamp


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise UsageError(f"{text!r:.200} is no JSON") from None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
