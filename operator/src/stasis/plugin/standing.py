"""How a TrainJob stands: one phase, and what each rank does; a pure function of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from stasis.api.names import (
    CHECKPOINT_UID,
    GATE,
    PREPARED,
    RESTORE,
    UNPREPARED,
)
from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.api.v1alpha1.model import Condition
from stasis.api.v1alpha1.trainjobcheckpoint import CheckpointKind, ConditionType, Operation, RankStatus
from stasis.core.gate import Gate, Held, Open, parse_gate
from stasis.errors import UsageError
from stasis.kube.client import annotation, meta
from stasis.kube.ranks import rank_of
from stasis.plugin.snapshot import Snapshot

_BROKEN_OFF = ("Withdrawn", "RankLost", "StartedFresh")  # reasons of Restored=False that do not wait for the user


class Phase(StrEnum):
    STARTING = "Starting"
    RUNNING = "Running"
    CHECKPOINTING = "Checkpointing"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMING = "Resuming"
    RESTORING = "Restoring"
    COMPLETE = "Complete"
    FAILED = "Failed"
    DELETING = "Deleting"


@dataclass(frozen=True)
class Rank:
    """`address`: by which the processes know it, where that is not the pod's own."""

    rank: int
    pod: str
    state: str
    node: str = ""
    pod_ip: str = ""
    address: str = ""
    prepared: bool = False
    unprepared: str = ""  # why
    restarts: int = 0
    memory_bytes: int | None = None
    done_bytes: int | None = None  # of the operation under way


@dataclass(frozen=True)
class Standing:
    """`checkpoint`: what a resume begins from, or what is being made or restored. `notes` are for the user to know."""

    namespace: str
    name: str
    phase: Phase
    detail: str
    policy: str
    policy_in_force: str
    checkpoint: str
    restores: int
    frozen_seconds: str
    ranks: tuple[Rank, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {_camel(key): value for key, value in asdict(self).items()} | {
            "ranks": [{_camel(key): value for key, value in asdict(rank).items()} for rank in self.ranks],
            "notes": list(self.notes),
        }


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join("IP" if part == "ip" else part.capitalize() for part in rest)


def gate(snapshot: Snapshot) -> Gate:
    """As `Open` where it is not understood: the controller says what is wrong with it."""
    try:
        return parse_gate(annotation(snapshot.jobset, GATE) if snapshot.jobset is not None else "")
    except UsageError:
        return Open()


def condition(checkpoint: TrainJobCheckpoint, kind: ConditionType) -> Condition | None:
    conditions = checkpoint.status.conditions if checkpoint.status else []
    return next((c for c in conditions if c.type == kind), None)


def under_way(snapshot: Snapshot) -> tuple[TrainJobCheckpoint, Operation] | None:
    """The operation that has no end yet."""
    for checkpoint in reversed(snapshot.checkpoints):
        for operation in reversed(checkpoint.status.operations if checkpoint.status else []):
            if not operation.outcome:
                return checkpoint, operation
    return None


def failed_suspend(snapshot: Snapshot) -> TrainJobCheckpoint | None:
    """The checkpoint that the last suspend was to make, if there never will be one."""
    last = next((c for c in reversed(snapshot.checkpoints) if c.spec.kind is CheckpointKind.SUSPEND), None)
    return last if last is not None and last.condition(ConditionType.FAILED) else None


def standing(snapshot: Snapshot) -> Standing:
    phase, detail, checkpoint = _phase(snapshot)
    if checkpoint is None:
        checkpoint = _origin(snapshot)
    status = checkpoint.status if checkpoint else None
    return Standing(
        namespace=str(meta(snapshot.trainjob).get("namespace", "")),
        name=snapshot.name,
        phase=phase,
        detail=detail,
        policy=snapshot.policy,
        policy_in_force=snapshot.policy_in_force,
        checkpoint=checkpoint.metadata.name if checkpoint else "",
        restores=(status.restores or 0) if status else 0,
        frozen_seconds=(status.frozen_seconds or "") if status else "",
        ranks=_ranks(snapshot, checkpoint),
        notes=tuple(_notes(snapshot)),
    )


def _phase(snapshot: Snapshot) -> tuple[Phase, str, TrainJobCheckpoint | None]:
    if meta(snapshot.trainjob).get("deletionTimestamp"):
        return Phase.DELETING, "", None
    for kind, phase in (("Complete", Phase.COMPLETE), ("Failed", Phase.FAILED)):
        for found in snapshot.trainjob.get("status", {}).get("conditions", ()):
            if found["type"] == kind and found["status"] == "True":
                return phase, str(found.get("message", "")), None
    if active := under_way(snapshot):
        checkpoint, operation = active
        phases = {"release": Phase.SUSPENDING, "continue": Phase.CHECKPOINTING, "restore": Phase.RESTORING}
        message = checkpoint.status.message if checkpoint.status else ""
        return phases[operation.kind], message, checkpoint
    return _suspended(snapshot) if snapshot.suspend else _wanted(snapshot)


def _suspended(snapshot: Snapshot) -> tuple[Phase, str, TrainJobCheckpoint | None]:
    if snapshot.jobset is not None and not snapshot.jobset_suspended:
        if failed := failed_suspend(snapshot):
            return Phase.RUNNING, f"the suspend failed: {_cause(failed)}", failed
        return Phase.SUSPENDING, "its checkpoint is about to begin", None
    held = _held(snapshot)
    if any(not meta(pod).get("deletionTimestamp") or _runs(pod) for pod in snapshot.pods):
        return Phase.SUSPENDING, "its pods end", held
    if held is not None:
        return Phase.SUSPENDED, "", held
    return Phase.SUSPENDED, "without a checkpoint: a resume starts it from the beginning", None


def _wanted(snapshot: Snapshot) -> tuple[Phase, str, TrainJobCheckpoint | None]:
    """Not to be suspended, and nothing is under way."""
    if snapshot.jobset_suspended:
        held = _held(snapshot)
        if held is not None and (cause := _not_restored(held, int(meta(snapshot.trainjob).get("generation") or 0))):
            return Phase.SUSPENDED, f"it could not be restored: {cause}", held
        waits = f"its former pods end, on {_nodes(snapshot)}" if snapshot.pods else "preflight"
        return Phase.RESUMING, waits if held is not None else "", held
    pods = [pod for pod in snapshot.pods if not meta(pod).get("deletionTimestamp")]
    if not pods or not all(_runs(pod) or _phase_of(pod) == "Succeeded" for pod in pods):
        return (
            (Phase.RESUMING, "its pods start", _origin(snapshot)) if _origin(snapshot) else (Phase.STARTING, "", None)
        )
    if waiting := next((c for c in snapshot.checkpoints if _awaited(c, pods)), None):
        return Phase.RESTORING, "about to begin", waiting
    return Phase.RUNNING, "", None


def _nodes(snapshot: Snapshot) -> str:
    return ", ".join(sorted({str((pod.get("spec") or {}).get("nodeName") or "no node") for pod in snapshot.pods}))


def _awaited(checkpoint: TrainJobCheckpoint, pods: list[Mapping[str, Any]]) -> bool:
    """Whether the pods are placeholders for a restore of it that has not been described yet."""
    generations = {
        annotation(pod, RESTORE) for pod in pods if annotation(pod, CHECKPOINT_UID) == checkpoint.metadata.uid
    }
    operations = checkpoint.status.operations if checkpoint.status else []
    begun = {str(operation.serial) for operation in operations if operation.kind == "restore"}
    return bool(generations - {""} - begun) and not checkpoint.condition(ConditionType.RESTORED)


def _held(snapshot: Snapshot) -> TrainJobCheckpoint | None:
    state = gate(snapshot)
    if not isinstance(state, Held):
        return None
    everything = (*snapshot.checkpoints, *snapshot.namesakes)
    return next((c for c in everything if c.metadata.name == state.checkpoint), None)


def _origin(snapshot: Snapshot) -> TrainJobCheckpoint | None:
    """What the pods that are there come from."""
    uids = {annotation(pod, CHECKPOINT_UID) for pod in snapshot.pods} - {""}
    return next((c for c in reversed(snapshot.checkpoints) if c.metadata.uid in uids), None)


def _not_restored(checkpoint: TrainJobCheckpoint, generation: int) -> str:
    """Why it waits for the user; empty where another attempt is due: the user has asked anew, or the last one was
    broken off by something else."""
    found = condition(checkpoint, ConditionType.RESTORED)
    if found is None or found.status != "False" or found.reason in _BROKEN_OFF:
        return ""
    asked_anew = found.observed_generation is not None and found.observed_generation < generation
    return "" if asked_anew else found.message or found.reason


def _cause(failed: TrainJobCheckpoint) -> str:
    found = condition(failed, ConditionType.FAILED)
    return (found.message or found.reason) if found else ""


def _ranks(snapshot: Snapshot, checkpoint: TrainJobCheckpoint | None) -> tuple[Rank, ...]:
    known = {rank.rank: rank for rank in (checkpoint.status.ranks if checkpoint and checkpoint.status else [])}
    pods = sorted(snapshot.pods, key=lambda pod: (rank_of(pod), meta(pod).get("creationTimestamp", "")))
    shown = [_rank(pod, known.get(rank_of(pod))) for pod in pods]
    missing = known.keys() - {rank.rank for rank in shown}
    shown += [
        Rank(rank, known[rank].pod, "saved", known[rank].node, memory_bytes=known[rank].memory_bytes)
        for rank in missing
    ]
    return tuple(sorted(shown, key=lambda rank: rank.rank))


def _rank(pod: Mapping[str, Any], known: RankStatus | None) -> Rank:
    status = pod.get("status") or {}
    ip = str(status.get("podIP") or "")
    address = known.addresses[0] if known and known.addresses else ""
    return Rank(
        rank=rank_of(pod),
        pod=str(meta(pod)["name"]),
        state=_state(pod),
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        pod_ip=ip,
        address=address if address != ip else "",
        prepared=bool(annotation(pod, PREPARED)),
        unprepared=annotation(pod, UNPREPARED),
        restarts=sum(int(c.get("restartCount") or 0) for c in status.get("containerStatuses") or ()),
        memory_bytes=known.memory_bytes if known else None,
        done_bytes=known.uploaded_bytes if known else None,
    )


def _state(pod: Mapping[str, Any]) -> str:
    if meta(pod).get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason", "")) and reason != "PodInitializing":
            return str(reason)
    return _phase_of(pod) or "Pending"


def _phase_of(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def _runs(pod: Mapping[str, Any]) -> bool:
    return _phase_of(pod) == "Running"


def _notes(snapshot: Snapshot) -> list[str]:
    notes = []
    wanted, force = snapshot.policy, snapshot.policy_in_force
    if not wanted and not force:
        notes.append(
            "not enabled: kubectl label trainjob NAME stasis.dev/policy=default".replace("NAME", snapshot.name)
        )
    elif snapshot.jobset is not None and wanted != force:
        change = f"{force or 'none'} -> {wanted or 'none'}"
        notes.append(f"its policy label was changed later ({change}): that counts from the next resume")
    for pod in snapshot.pods:
        if reason := annotation(pod, UNPREPARED):
            notes.append(f"pod {meta(pod)['name']} is not prepared: {reason}")
    if force and not notes and any(not annotation(pod, PREPARED) for pod in snapshot.pods):
        notes.append("its pods were made before it was enabled: they are prepared at the next resume")
    if not snapshot.checkpoints and snapshot.namesakes:
        names = ", ".join(c.metadata.name for c in snapshot.namesakes)
        notes.append(f"a job before it under its name left checkpoints: {names} (kubectl stasis resume --from or fork)")
    return notes
