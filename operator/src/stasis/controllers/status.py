"""What a TrainJobCheckpoint's status says: changes of it, computed from the object as it was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from stasis.api.v1alpha1.trainjobcheckpoint import ConditionType
from stasis.controllers.description import Description, making
from stasis.controllers.fixed import image
from stasis.controllers.observe import (
    LOCAL,
    ORPHANED,
    RANK_LOST,
    STARTED_FRESH,
    WITHDRAWN,
    condition,
    container_name,
    end_of,
)
from stasis.controllers.operations import News
from stasis.core.durability import alone
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Failure, Record, Verdict
from stasis.core.steps import Step
from stasis.kube.client import meta
from stasis.kube.ranks import rank_of
from stasis.kube.records import parse

Status = dict[str, Any]
Results = Mapping[Step, Mapping[int, Mapping[str, Any]]]

MAX_MESSAGE = 8192
FROZEN_FROM, FROZEN_TO = Step.FREEZE, (Step.THAW, Step.STORE)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def size(count: int) -> str:
    """Bytes for people."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def with_condition(
    obj: Any, kind: ConditionType, holds: bool, reason: str, message: str = "", generation: int | None = None
) -> list[dict[str, Any]]:
    """The object's conditions, with this one. The time of a condition that held before stays."""
    before = condition(obj, kind)
    status = "True" if holds else "False"
    new: dict[str, Any] = {
        "type": str(kind),
        "status": status,
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else now(),
    }
    if generation is not None:
        new["observedGeneration"] = generation
    others = [c for c in (obj.get("status") or {}).get("conditions") or () if c["type"] != kind]
    return [*others, new]


def begun(obj: Any, description: Description, pods: Iterable[Any], **facts: Any) -> Status:
    """An operation is to be led. `facts`: further fields of the status."""
    spec = description.spec
    entry = {
        "op": spec.op,
        "kind": str(spec.kind),
        "serial": spec.serial,
        "spec": description.to_json(),
        "startTime": now(),
    }
    status = obj.get("status") or {}
    operations = list(status.get("operations") or ())
    if spec.kind is Kind.RESTORE:
        ended = [o for o in operations if o["kind"] == str(Kind.RESTORE)][-1:]
        operations = [o for o in operations if o["kind"] != str(Kind.RESTORE)] + ended
        facts["restores"] = int(status.get("restores") or 0) + 1
    return {"operations": [*operations, entry], "ranks": _ranks(status, description, pods), **facts}


def _ranks(status: Status, description: Description, pods: Iterable[Any]) -> list[dict[str, Any]]:
    """Where each rank is now; what is known of it otherwise stays."""
    known = {rank["rank"]: dict(rank) for rank in status.get("ranks") or ()}
    for pod in pods:
        rank = rank_of(pod)
        addresses = description.addresses[rank]
        entry = known.setdefault(rank, {"rank": rank})
        entry.pop("uploadedBytes", None)
        entry |= {
            "pod": meta(pod)["name"],
            "node": description.nodes[rank],
            "container": container_name(pod),
            "addresses": list(addresses),
            "podIP": addresses[-1] if len(addresses) > 1 else "",
        }
        if description.spec.kind is not Kind.RESTORE:
            entry["image"] = image(pod)
    return [entry for _, entry in sorted(known.items())]


def concluded(obj: Any, op: str, results: Results, generation: int) -> Status:
    """The operation has ended, as its record says."""
    operations = [dict(o) for o in obj["status"]["operations"]]
    entry = next(o for o in operations if o["op"] == op)
    end = end_of(entry)
    outcome = Outcome(end["outcome"])
    failures = tuple(Failure.from_dict(failure) for failure in end["failures"])
    entry |= {"outcome": str(outcome), "endTime": now()}
    change: Status = {"operations": operations}
    if outcome in (Outcome.RELEASED, Outcome.CONTINUED):
        commit = commit_of(entry)
        assert commit is not None
        return change | _saved(obj, commit, outcome, results, Description.from_json(entry["spec"]))
    if outcome is Outcome.ABORTED:
        reason, message = _cause(failures)
        conditions = with_condition(obj, ConditionType.FAILED, True, reason, message, generation)
        return change | {"conditions": conditions, "message": message, "completionTime": now()}
    return change | _restored(obj, outcome, failures, generation)


def under_way(obj: Any, news: News) -> Status | None:
    """How far an operation is; None where there is nothing to say of it any more."""
    there = obj.get("status") or {}
    entry = next((o for o in there.get("operations") or () if o["op"] == news.op), None)
    if entry is None or any(record["verdict"] == Verdict.ENDED for record in entry.get("records") or ()):
        return None
    message = news.step
    if news.step == Step.STORE and news.stored:
        message += f": {size(sum(news.stored.values()))}"
        message += f" of {size(sum(news.sizes.values()))}" if news.sizes else ""
    ranks = [dict(rank) for rank in there.get("ranks") or ()]
    for rank in ranks:
        if rank["rank"] in news.sizes:
            rank["memoryBytes"] = news.sizes[rank["rank"]]
        if rank["rank"] in news.stored:
            rank["uploadedBytes"] = news.stored[rank["rank"]]
    return {"message": message, "ranks": ranks}


def commit_of(entry: Mapping[str, Any]) -> Record | None:
    """Of an operation."""
    return next((parse(dict(r)) for r in entry.get("records") or () if r["verdict"] == Verdict.COMMIT), None)


def manifests_of(checkpoint: Any) -> dict[int, str]:
    """Of a committed checkpoint: rank -> digest. Only what its Commit says counts (rule 27)."""
    for entry in (checkpoint.get("status") or {}).get("operations") or ():
        if entry["kind"] != str(Kind.RESTORE) and (commit := commit_of(entry)) is not None:
            return dict(commit.manifests)
    return {}


def _saved(obj: Any, commit: Record, outcome: Outcome, results: Results, description: Description) -> Status:
    ranks = {rank["rank"]: dict(rank) for rank in obj["status"].get("ranks") or ()}
    for rank, manifest in commit.manifests.items():
        ranks.setdefault(rank, {"rank": rank})["manifest"] = manifest
        ranks[rank]["seconds"] = _seconds(results, rank)
    changed = dict(obj)
    for kind in (ConditionType.COMPLETE, ConditionType.DURABLE, ConditionType.RELEASED):
        if kind is ConditionType.RELEASED and outcome is not Outcome.RELEASED:
            continue
        if kind is ConditionType.DURABLE and description.local:
            conditions = _alone(changed, alone({description.nodes[rank] for rank in commit.manifests}))
        else:
            reason = "Committed" if kind is ConditionType.COMPLETE else str(kind)
            conditions = with_condition(changed, kind, True, reason)
        changed = {**changed, "status": {**changed["status"], "conditions": conditions}}
    status: Status = {
        "ranks": [entry for _, entry in sorted(ranks.items())],
        "conditions": changed["status"]["conditions"],
        "completionTime": now(),
        "message": "",
    }
    if (frozen := _frozen(results)) is not None:
        status["frozenSeconds"] = f"{frozen:.3f}"
    return status


def _seconds(results: Results, rank: int) -> dict[str, str]:
    """How long each step took this rank."""
    timed = {step: result[rank] for step, result in results.items() if "ended" in result.get(rank, {})}
    return {str(step): f"{max(0.0, times['ended'] - times['began']):.4f}" for step, times in timed.items()}


def _frozen(results: Results) -> float | None:
    """The longest that a rank stood still: from its freeze to its thaw, or to the end of its part of the work."""
    spans = []
    for rank, froze in results.get(FROZEN_FROM, {}).items():
        ends = [results[step][rank]["ended"] for step in FROZEN_TO if "ended" in results.get(step, {}).get(rank, {})]
        if "began" in froze and ends:
            spans.append(ends[0] - froze["began"])
    return max(spans, default=None)


def _restored(obj: Any, outcome: Outcome, failures: tuple[Failure, ...], generation: int) -> Status:
    if outcome is Outcome.RESTORED:
        conditions = _used(with_condition(obj, ConditionType.RESTORED, True, "Restored"))
        return {"conditions": conditions, "message": ""}
    reason, message = _cause(failures)
    if outcome is Outcome.BROKEN:
        conditions = _used(with_condition(obj, ConditionType.RESTORED, True, "Broken", message))
        return {"conditions": conditions, "message": message}
    conditions = with_condition(obj, ConditionType.RESTORED, False, reason, message, generation)
    broken_off = reason in (RANK_LOST, WITHDRAWN)
    return {"conditions": conditions if broken_off else _used(conditions), "message": message}


def _alone(obj: Any, message: str) -> list[dict[str, Any]]:
    return with_condition(obj, ConditionType.DURABLE, False, LOCAL, message)


def uploading(obj: Any, message: str) -> Status:
    return {"conditions": _alone(obj, message)}


def uploaded(obj: Any) -> Status:
    return {"conditions": with_condition(obj, ConditionType.DURABLE, True, "Durable")}


def lost(obj: Any, message: str, generation: int | None) -> Status:
    """The registry will never have all of it. `generation`: of the TrainJob whose state is in it, None for none."""
    conditions = with_condition(obj, ConditionType.DURABLE, False, "Lost", message)
    conditions = with_condition({"status": {"conditions": conditions}}, ConditionType.LOST, True, "NodeLost", message)
    if generation is not None:
        there = {"status": {"conditions": conditions}}
        conditions = _used(with_condition(there, ConditionType.RESTORED, False, "Lost", message, generation))
    return {"conditions": conditions, "message": message[:MAX_MESSAGE]}


def failed(obj: Any, reason: str, message: str) -> Status:
    """There never will be a checkpoint, for a cause other than an operation's."""
    return {
        "conditions": with_condition(obj, ConditionType.FAILED, True, reason, message),
        "message": message[:MAX_MESSAGE],
        "completionTime": now(),
    }


def orphaned(obj: Any) -> Status:
    message = "its TrainJob was deleted; it is kept for a while"
    return {"conditions": with_condition(obj, ConditionType.EXPIRED, False, ORPHANED, message), "message": message}


def expired(obj: Any, message: str) -> Status:
    return {"conditions": with_condition(obj, ConditionType.EXPIRED, True, "Expired", message), "message": message}


def not_restorable(obj: Any, reason: str, message: str, generation: int) -> Status:
    return {
        "conditions": _used(with_condition(obj, ConditionType.RESTORED, False, reason, message, generation)),
        "message": message[:MAX_MESSAGE],
    }


def started_fresh(obj: Any) -> Status:
    message = "the training began anew"
    before = condition(obj, ConditionType.RESTORED).get("message", "")
    text = f"{message}: {before}" if before else message
    conditions = _used(with_condition(obj, ConditionType.RESTORED, False, STARTED_FRESH, text))
    return {"conditions": conditions, "message": text}


def chosen(obj: Any) -> Status:
    return {"conditions": with_condition(obj, ConditionType.CURRENT, True, "Chosen", "the job is resumed from it")}


def gone_back(obj: Any) -> Status:
    text = "ranks were lost: the job is resumed from it"
    return {"conditions": with_condition(obj, ConditionType.CURRENT, True, "RolledBack", text)}


def passed_over(obj: Any, other: str) -> Status:
    message = f"the job is resumed from {other}"
    return {"conditions": with_condition(obj, ConditionType.CURRENT, False, "PassedOver", message)}


def forked(obj: Any, serial: int, origin: Any) -> Status:
    """Of a copy of a checkpoint, for another job: the same bytes by the same digests."""
    there = origin["status"]
    kept = ("repository", "container", "fixed", "index", "tag", "worldSize", "memoryBytes", "storedBytes", "size")
    known = ("rank", "image", "manifest", "addresses", "memoryBytes", "storedBytes", "fingerprint")
    status: Status = {key: there[key] for key in kept if key in there} | {
        "serial": serial,
        "policy": obj["spec"].get("policy", ""),
        "ranks": [{key: rank[key] for key in known if key in rank} for rank in there.get("ranks") or ()],
        "operations": [making(origin)],
        "startTime": now(),
        "completionTime": now(),
    }
    changed = {**obj, "status": status}
    for kind in (ConditionType.COMPLETE, ConditionType.DURABLE, ConditionType.RELEASED):
        text = f"of {meta(origin)['name']}"
        status["conditions"] = with_condition(changed, kind, True, "Forked", text)
    return status | chosen(changed)


def _used(conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The job is resumed from it, or cannot be: what was chosen is done."""
    return [condition for condition in conditions if condition["type"] != ConditionType.CURRENT]


def _cause(failures: tuple[Failure, ...]) -> tuple[str, str]:
    """The reason of a condition, and all causes for people."""
    if not failures:
        return "Unknown", "no cause is known"
    return failures[0].reason, "; ".join(str(failure) for failure in failures)[:MAX_MESSAGE]
