"""The API's objects as `core.view` has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicySpec, OnDelete, OnFailure, OnRestoreFailure
from stasis.api.v1alpha1.trainjobcheckpoint import CheckpointKind, ConditionType
from stasis.core import gate
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Verdict
from stasis.core.view import (
    Checkpoint,
    Choice,
    Failed,
    Incarnation,
    Job,
    JobSet,
    Operation,
    Pod,
    Policy,
    Retention,
    Use,
)
from stasis.errors import UsageError
from stasis.kube.client import annotation, meta
from stasis.kube.ranks import rank_of, trainers

OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
NONCE = re.compile(r"[0-9a-f]{10}")

REFUSED = ("Refused", "Unsupported")  # reasons of Failed: another attempt would meet the same
STARTED_FRESH = "StartedFresh"  # reasons of Restored=False; any other than these three means that it cannot be restored
WITHDRAWN = "Withdrawn"
RANK_LOST = "RankLost"
IMPORT, FORK_OF = "import", "fork of "  # who asked for a checkpoint that is filled in when it is made
LOCAL = "Local"  # reason of Durable=False: on its nodes alone
ORPHANED = "TrainJobDeleted"  # reason of Expired=False: kept for a while


def condition(obj: Any, kind: str) -> dict[str, Any]:
    """Empty where there is none."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((dict(c) for c in conditions if c.get("type") == kind), {})


def holds(obj: Any, kind: str) -> bool:
    return condition(obj, kind).get("status") == "True"


def seconds(time: str | None) -> float:
    """Of the wall clock; 0 for none."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def job_of(obj: Any, asked_at: float) -> Job:
    """`asked_at`: when we first saw that it is to be suspended, for as long as Trainer has not said so."""
    about, spec = meta(obj), obj.get("spec") or {}
    since = seconds(condition(obj, "Suspended")["lastTransitionTime"]) if holds(obj, "Suspended") else asked_at
    return Job(
        uid=about["uid"],
        suspend=bool(spec.get("suspend")),
        generation=int(about.get("generation", 0)),
        since=since,
        deleting="deletionTimestamp" in about,
        finished=holds(obj, "Complete") or holds(obj, "Failed"),
        discard=annotation(obj, names.DISCARD) == "true",
        choice=_choice(annotation(obj, names.FROM)),
        check=nonce if NONCE.fullmatch(nonce := annotation(obj, names.CHECK)) else "",
    )


def _choice(text: str) -> Choice | None:
    name, _, current = text.partition("/")
    return Choice(name if OBJECT_NAME.fullmatch(name) else "", current) if text else None


def jobset_of(obj: Any) -> JobSet:
    spec = obj.get("spec") or {}
    gang = trainers(obj)
    try:
        state = gate.parse_gate(annotation(obj, names.GATE))
    except UsageError:  # written by somebody else: the webhook reads it the same way
        state = gate.Open()
    return JobSet(
        suspend=bool(spec.get("suspend")),
        ranks=sum(trainer.ranks for trainer in gang),
        gate=state,
        restoring=_number(annotation(obj, names.RESTORE)),
        incarnation=_incarnation(gang[0].template.get("metadata") or {}) if gang else None,
        deleting="deletionTimestamp" in meta(obj),
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _incarnation(about: Mapping[str, Any]) -> Incarnation | None:
    try:
        stamp = gate.Stamp.of(about.get("annotations") or {})
    except UsageError:
        return None
    return Incarnation(stamp.uid, stamp.generation) if stamp else None


def container_name(pod: Any) -> str:
    """Of the container that is checkpointed."""
    return annotation(pod, names.CONTAINER) or CheckpointPolicySpec().container


def container_status(pod: Any) -> dict[str, Any] | None:
    """Of the container that is checkpointed."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((dict(s) for s in statuses if s["name"] == container_name(pod)), None)


def unprepared(pod: Any) -> str:
    """Why a rank's pod cannot be checkpointed; empty where it can."""
    if annotation(pod, names.PREPARED):
        return ""
    return annotation(pod, names.UNPREPARED) or "the job was not enabled when the pod was made"


def pod_of(obj: Any, told: bool = False) -> Pod:
    about, status = meta(obj), obj.get("status") or {}
    running = ((container_status(obj) or {}).get("state") or {}).get("running") is not None
    return Pod(
        rank=rank_of(obj),
        name=about["name"],
        uid=about["uid"],
        running=running and bool(status.get("podIP")),
        succeeded=status.get("phase") == "Succeeded",
        failed=status.get("phase") == "Failed",
        terminating="deletionTimestamp" in about,
        incarnation=_incarnation(about),
        told=told,
        node=str((obj.get("spec") or {}).get("nodeName") or ""),
    )


def unready_since(node: Any) -> float:
    """Since when a node is not ready, in seconds of the wall clock; 0 for one that is, or has not said so yet."""
    ready = condition(node, "Ready")
    return 0.0 if ready.get("status", "True") == "True" else seconds(ready["lastTransitionTime"])


def checkpoint_of(obj: Any, pods: Mapping[str, Mapping[int, str]]) -> Checkpoint:
    """`pods`: by operation, as its description has them. A suspend's serial is in its name from the first."""
    about, spec, status = meta(obj), obj["spec"], obj.get("status") or {}
    operations = [_operation(entry, pods[entry["op"]]) for entry in status.get("operations") or ()]
    failed = condition(obj, ConditionType.FAILED)
    kind = Kind.RELEASE if spec.get("kind") == CheckpointKind.SUSPEND else Kind.CONTINUE
    use, seen = _use(obj)
    asked = str(spec.get("requestedBy", ""))
    expired = condition(obj, ConditionType.EXPIRED)
    return Checkpoint(
        name=about["name"],
        uid=about["uid"],
        job=spec["trainJob"]["uid"],
        kind=kind,
        serial=int(status.get("serial") or (_number(about["name"].rpartition("-")[2]) if kind is Kind.RELEASE else 0)),
        operation=next((o for o in operations if o.kind is not Kind.RESTORE), None),
        restore=next((o for o in reversed(operations) if o.kind is Kind.RESTORE), None),
        failed=Failed(seconds(failed["lastTransitionTime"]), failed.get("message", ""), failed["reason"] in REFUSED)
        if failed.get("status") == "True"
        else None,
        published=bool(status.get("tag")),
        use=use,
        seen=seen,
        deleting="deletionTimestamp" in about,
        completed_at=seconds(status.get("completionTime")),
        orphaned_at=seconds(expired["lastTransitionTime"]) if expired.get("reason") == ORPHANED else 0.0,
        size=int(status.get("storedBytes") or 0),
        policy=status.get("policy") or spec.get("policy") or "",
        lost=holds(obj, ConditionType.LOST) or holds(obj, ConditionType.EXPIRED),
        imported=asked == IMPORT,
        fork_of=asked.removeprefix(FORK_OF) if asked.startswith(FORK_OF) else "",
        local=condition(obj, ConditionType.DURABLE).get("reason") == LOCAL,
    )


def is_copy(obj: Any) -> bool:
    """Whether it is one of another job's or another cluster's, whose addresses are not ours to ask for."""
    asked = str(obj["spec"].get("requestedBy", ""))
    return asked == IMPORT or asked.startswith(FORK_OF)


def _operation(entry: Mapping[str, Any], pods: Mapping[int, str]) -> Operation:
    records = entry.get("records") or ()
    verdicts = frozenset(Verdict(record["verdict"]) for record in records)
    return Operation(
        op=entry["op"],
        serial=int(entry["serial"]),
        kind=Kind(entry["kind"]),
        pods=pods,
        verdicts=verdicts,
        outcome=Outcome(end_of(entry)["outcome"]) if Verdict.ENDED in verdicts else None,
        concluded=bool(entry.get("outcome")),
    )


def _use(obj: Any) -> tuple[Use, int]:
    match condition(obj, ConditionType.CURRENT).get("status"):
        case "True":
            return Use.CHOSEN, 0
        case "False":
            return Use.PASSED, 0
    restored = condition(obj, ConditionType.RESTORED)
    match restored.get("status"), restored.get("reason"):
        case "True", _:
            return Use.RESTORED, 0
        case "False", "StartedFresh":
            return Use.FRESH, 0
        case "False", reason if reason not in (WITHDRAWN, RANK_LOST):
            return Use.FAILED, int(restored.get("observedGeneration") or 0)
        case _:
            return Use.UNUSED, 0


def end_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an operation's end."""
    record: dict[str, Any] = next(
        json.loads(record["record"]) for record in entry["records"] if record["verdict"] == Verdict.ENDED
    )
    return record


def policy_name(enabled_by: str, checkpoints: Sequence[Checkpoint]) -> str:
    """Of the policy that counts: the JobSet's; where it is gone that of the last checkpoint."""
    made_under = (checkpoint.policy for checkpoint in reversed(checkpoints) if checkpoint.policy)
    return enabled_by or next(made_under, names.DEFAULT_POLICY)


def policy_of(spec: CheckpointPolicySpec) -> Policy:
    return Policy(
        timeout=float(spec.timeout_seconds),
        lost_after=float(spec.lost_after_seconds),
        suspend_anyway=spec.on_failure is OnFailure.SUSPEND,
        start_fresh=spec.on_restore_failure is OnRestoreFailure.START_FRESH,
        retention=Retention(
            keep=spec.retention.keep,
            ttl=spec.retention.ttl_seconds,
            delete_with_job=spec.on_delete is OnDelete.DELETE,
            ttl_after_delete=float(spec.ttl_seconds_after_delete),
        ),
    )
