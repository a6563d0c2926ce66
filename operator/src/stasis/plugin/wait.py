"""Waiting for what was asked for: the API server is looked at until it is there, will never be, or time is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightkube.resources.core_v1 import Event

from stasis import errors
from stasis.api.names import CHECK, FINDINGS
from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.api.v1alpha1.trainjobcheckpoint import CheckpointKind, ConditionType
from stasis.core.gate import Held
from stasis.errors import CheckpointFailed, NotFound, Refused, RestoreFailed, StasisError, TimedOut, Unavailable
from stasis.kube.client import meta
from stasis.plugin.actions import patch
from stasis.plugin.cluster import Cluster, asked
from stasis.plugin.snapshot import Snapshot, take
from stasis.plugin.standing import Phase, Standing, condition, failed_suspend, gate, standing

INTERVAL = 1.0  # seconds between two looks

Told = Callable[[Standing], None]
Look = Callable[[Snapshot], str | None]
"""What was waited for, in words; None while it is to be waited for. Raises what stands in the way for good."""


def until(cluster: Cluster, job: str, look: Look, timeout: float, told: Told) -> str:
    """Raises TimedOut after `timeout` seconds. An API server that does not answer is asked again until then."""
    end = time.monotonic() + timeout
    last: Standing | None = None
    while True:
        trouble: StasisError | None = None
        try:
            snapshot = take(cluster, job)
            last = standing(snapshot)
            told(last)
            if (word := look(snapshot)) is not None:
                return word
        except Unavailable as error:
            trouble = error
        if time.monotonic() >= end:
            where = str(trouble) if trouble else f"{last.phase}: {last.detail}".rstrip(": ") if last else ""
            raise TimedOut(
                f"TrainJob {job} is not there after {timeout:.0f} s ({where}); what was asked for goes on",
                remedy=f"kubectl stasis status {job} --watch, or cancel {job}",
            )
        time.sleep(min(INTERVAL, max(0.0, end - time.monotonic())))


def suspended(before: Snapshot) -> Look:
    """For a suspend that was asked for after `before`."""
    known = {c.metadata.uid for c in before.checkpoints if _is_done(c) and not before.suspend}

    def look(snapshot: Snapshot) -> str | None:
        if not snapshot.suspend:
            raise CheckpointFailed("somebody resumed it meanwhile", remedy=f"kubectl stasis status {snapshot.name}")
        new = [c for c in snapshot.checkpoints if c.spec.kind is CheckpointKind.SUSPEND and c.metadata.uid not in known]
        last = new[-1] if new else None
        if snapshot.jobset_suspended:
            if last is not None and last.condition(ConditionType.RELEASED):
                return f"suspended, saved as {last.metadata.name}"
            if isinstance(gate(snapshot), Held) or snapshot.pods:
                return None
            if last is not None and last.condition(ConditionType.FAILED):
                raise _failure(last, ConditionType.FAILED, CheckpointFailed, "suspended without a checkpoint: ")
            return "suspended without a checkpoint"
        failed = failed_suspend(snapshot)
        if failed is not None and failed.metadata.uid not in known:
            error = _failure(failed, ConditionType.FAILED, CheckpointFailed)
            if isinstance(error, Refused):  # another attempt would find the same; after other failures there is one
                raise error
        return None

    return look


def resumed(before: Snapshot) -> Look:
    """For a resume that was asked for after `before`."""
    known = {c.metadata.uid: _attempt(c) for c in before.checkpoints}

    def look(snapshot: Snapshot) -> str | None:
        now = standing(snapshot)
        used = next((c for c in snapshot.checkpoints if c.metadata.name == now.checkpoint), None)
        if used is not None and now.phase is Phase.SUSPENDED and _attempt(used) != known.get(used.metadata.uid):
            raise _failure(used, ConditionType.RESTORED, RestoreFailed)
        if snapshot.suspend:
            raise RestoreFailed("somebody suspended it meanwhile", remedy=f"kubectl stasis status {snapshot.name}")
        if now.phase is Phase.RUNNING:
            restored = used is not None and used.condition(ConditionType.RESTORED)
            return f"running, restored from {now.checkpoint}" if restored else "running, from the beginning"
        return "complete" if now.phase is Phase.COMPLETE else None

    return look


def checkpointed(name: str) -> Look:
    """For a checkpoint of a job that goes on."""

    def look(snapshot: Snapshot) -> str | None:
        made = next((c for c in snapshot.checkpoints if c.metadata.name == name), None)
        if made is None:
            raise CheckpointFailed(f"checkpoint {name} was deleted meanwhile")
        for bad in (ConditionType.FAILED, ConditionType.LOST):
            if made.condition(bad):
                raise _failure(made, bad, CheckpointFailed)
        return f"saved as {name}" if made.condition(ConditionType.DURABLE) else None

    return look


def chosen(name: str | None) -> Look:
    """For the controller to take a checkpoint as the one to resume from; None: one of a fork's own."""

    def look(snapshot: Snapshot) -> str | None:
        state = gate(snapshot)
        if isinstance(state, Held) and name in (None, state.checkpoint):
            return state.checkpoint
        return None

    return look


def cancelled(snapshot: Snapshot) -> str | None:
    return "nothing is under way" if standing(snapshot).phase in (Phase.RUNNING, Phase.SUSPENDED) else None


def refusal(cluster: Cluster, job: str, since: frozenset[str]) -> str:
    """The cause in the newest event that refuses a checkpoint; empty where there is none but those of `since`."""
    found = [e for e in events(cluster, job) if e["reason"] == "CheckpointRefused" and _identity(e) not in since]
    return str(found[-1]["message"]) if found else ""


def seen(cluster: Cluster, job: str) -> frozenset[str]:
    return frozenset(_identity(event) for event in events(cluster, job))


def _identity(event: dict[str, Any]) -> str:
    return f"{meta(event)['uid']}/{event.get('count')}"


def events(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """About a TrainJob, oldest first."""
    fields: Any = {"involvedObject.name": job, "involvedObject.kind": "TrainJob"}
    with asked(f"events of {job}"):
        found = [e.to_dict() for e in cluster.client.list(Event, namespace=cluster.namespace, fields=fields)]
    return sorted(found, key=_time)


def _time(event: dict[str, Any]) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), meta(event).get("creationTimestamp"))
    return max(str(at or "") for at in times)


def answer(cluster: Cluster, job: str, nonce: str, timeout: float) -> dict[str, Any]:
    """What a check found. Raises TimedOut where no controller answers."""
    end = time.monotonic() + timeout
    name = f"{job}.check-{nonce}"
    try:
        while time.monotonic() < end:
            with suppress(NotFound), asked(name):
                event = cluster.client.get(Event, name, namespace=cluster.namespace).to_dict()
                found: dict[str, Any] = json.loads((meta(event).get("annotations") or {}).get(FINDINGS, "{}"))
                return found
            time.sleep(min(INTERVAL, max(0.0, end - time.monotonic())) / 2)
    finally:
        patch(cluster, job, {CHECK: None})
    raise TimedOut(
        f"no controller answered within {timeout:.0f} s",
        remedy="kubectl stasis doctor tells whether Stasis is well in this cluster",
    )


def _is_done(checkpoint: TrainJobCheckpoint) -> bool:
    return checkpoint.condition(ConditionType.RELEASED) or checkpoint.condition(ConditionType.FAILED)


def _attempt(checkpoint: TrainJobCheckpoint) -> tuple[int, str]:
    found = condition(checkpoint, ConditionType.RESTORED)
    restores = (checkpoint.status.restores or 0) if checkpoint.status else 0
    return restores, f"{found.status} {found.last_transition_time}" if found else ""


def _failure(
    checkpoint: TrainJobCheckpoint, kind: ConditionType, default: type[StasisError], prefix: str = ""
) -> StasisError:
    """The error that a condition tells of, of its class: so that exit codes are those of `stasis`."""
    found = condition(checkpoint, kind)
    reason = found.reason if found else ""
    message = (found.message or reason) if found else str(kind)
    return failure(reason, f"{prefix}checkpoint {checkpoint.metadata.name}: {message}", default)


def failure(reason: str, message: str, default: type[StasisError]) -> StasisError:
    """An error of the class that `reason` names, without what its own constructor would want to know."""
    named = getattr(errors, reason, None)
    kind = named if isinstance(named, type) and issubclass(named, StasisError) else default
    error = kind.__new__(kind)
    StasisError.__init__(error, message)
    if isinstance(error, Refused):
        error.findings = ()
    return error
