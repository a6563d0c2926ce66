"""Taking a checkpoint that lies in a registry into a cluster that knows nothing of it: as if it had been made there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lightkube.types import PatchType

from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.api.v1alpha1.trainjobcheckpoint import CheckpointKind, ConditionType
from stasis.core.plan import Kind, Outcome, Spec
from stasis.core.rankconfig import RankConfig
from stasis.core.records import Record, Verdict, decision_key, end_key, release_key
from stasis.errors import UsageError
from stasis.kube.client import Checkpoints, Conflict, meta
from stasis.plugin.cluster import Cluster, asked
from stasis.plugin.snapshot import checkpoints
from stasis.presentation import size
from stasis.store.checkpoint import Checkpoint, open_checkpoint
from stasis.store.reference import Reference

_REASON = "Imported"


def take_in(cluster: Cluster, where: str, *, job: str | None, name: str | None, policy: str) -> str:
    """Make a TrainJobCheckpoint of a checkpoint in a registry; its name. Raises UsageError, StoreError."""
    reference = Reference.parse(where)
    if reference.path is not None:
        raise UsageError(
            f"{where} is a folder of this machine, which no node can read",
            remedy="stasis cp FOLDER:TAG HOST/NAME:TAG, then import that",
        )
    with open_checkpoint(reference) as found:
        origin = _origin(found, job)
        configs = {rank.rank: RankConfig.from_dict(rank.config) for rank in found.ranks}
        status = _status(found, configs, reference, policy)
    name = name or _free(cluster, origin["name"])
    labels = TrainJobCheckpoint.labels_for(origin["name"], origin["uid"])
    spec = {"trainJob": origin, "kind": str(CheckpointKind.SUSPEND), "requestedBy": "import", "policy": policy}
    body = Checkpoints.from_dict(
        {"metadata": {"name": name, "namespace": cluster.namespace, "labels": labels}, "spec": spec}
    )
    what = f"TrainJobCheckpoint {cluster.namespace}/{name}"
    try:
        with asked(what):
            made = cluster.client.create(body)
    except Conflict as error:
        raise UsageError(f"{what} is there already", remedy="choose another --name") from error
    change = {"metadata": {"resourceVersion": meta(made)["resourceVersion"]}, "status": status}
    with asked(f"status of {what}"):
        cluster.client.patch(Checkpoints.Status, name, change, namespace=cluster.namespace, patch_type=PatchType.MERGE)
    return name


def _origin(found: Checkpoint, job: str | None) -> dict[str, str]:
    """The TrainJob that it was of, as far as it says so itself. Its UID is not one of this cluster's."""
    known = found.config.get("trainJob")
    known = known if isinstance(known, dict) else {}
    name = job or str(known.get("name") or "")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise UsageError("the checkpoint does not say which TrainJob it is of", remedy="name it by --job")
    return {"name": name, "uid": str(known.get("uid") or found.uid)[:64]}


def _free(cluster: Cluster, job: str) -> str:
    taken = {c.metadata.name for c in checkpoints(cluster)}
    return next(name for n in range(1, len(taken) + 2) if (name := f"{job}-import-{n}") not in taken)


def _status(found: Checkpoint, configs: Mapping[int, RankConfig], reference: Reference, policy: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    world_size = max(config.world_size for config in configs.values())
    ranks = [_rank(rank.digest, configs[rank.rank], rank.stats) for rank in found.ranks]
    stored = found.stored
    repository = f"{reference.host}/{reference.name}"
    condition = {"status": "True", "reason": _REASON, "message": f"from {reference}", "lastTransitionTime": now}
    done = (ConditionType.COMPLETE, ConditionType.DURABLE, ConditionType.RELEASED)
    return {
        "serial": 1,
        "policy": policy,
        "repository": repository,
        "container": str(found.config.get("container") or "node"),
        "index": found.digest,
        "tag": reference.tag,
        "worldSize": world_size,
        "ranks": ranks,
        "operations": [_operation(found, world_size, now)],
        "memoryBytes": sum(rank["memoryBytes"] for rank in ranks),
        "storedBytes": stored,
        "size": size(stored),
        "startTime": now,
        "completionTime": now,
        "conditions": [{"type": str(kind), **condition} for kind in done],
    }


def _rank(digest: str, config: RankConfig, stats: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rank": config.rank,
        "manifest": digest,
        "addresses": list(config.known().get(config.rank, ())),
        "memoryBytes": int(stats["raw"]),
        "storedBytes": int(stats["stored"]),
        "fingerprint": json.dumps(config.fingerprint, sort_keys=True),
    }


def _operation(found: Checkpoint, world_size: int, now: str) -> dict[str, Any]:
    """The operation that made it, under the UID that its manifests carry, with the records of its end."""
    op = found.uid
    numbers = tuple(rank.rank for rank in found.ranks)
    finished = tuple(sorted(set(range(world_size)) - set(numbers)))
    manifests = {rank.rank: rank.digest for rank in found.ranks}
    records = {
        decision_key(op): Record(Verdict.COMMIT, op, 0, 0, numbers, finished, manifests),
        release_key(op): Record(Verdict.RELEASE, op, 0, 0, numbers, finished),
        end_key(op): Record(Verdict.ENDED, op, 0, outcome=str(Outcome.RELEASED)),
    }
    spec = Spec(op=op, serial=1, kind=Kind.RELEASE, ranks=numbers, finished=finished)
    return {
        "op": op,
        "kind": str(Kind.RELEASE),
        "serial": 1,
        "spec": json.dumps(spec.to_dict()),
        "outcome": str(Outcome.RELEASED),
        "startTime": now,
        "endTime": now,
        "records": [
            {"key": key, "verdict": str(record.verdict), "epoch": record.epoch, "record": json.dumps(record.to_dict())}
            for key, record in records.items()
        ],
    }
