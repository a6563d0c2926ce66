"""What a user asks for, as writes to the user's own objects. The controller answers by what `snapshot` reads."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Mapping
from typing import Any, TextIO

import yaml
from lightkube.types import PatchType

from stasis.api.names import CHECK, DISCARD, FROM, PATCH_MANAGER, POLICY_LABEL, SHARE_VOLUMES
from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.api.v1alpha1.trainjobcheckpoint import CheckpointKind, ConditionType
from stasis.core.gate import Held
from stasis.errors import NotFound, StasisError, UsageError
from stasis.kube.client import Checkpoints, Conflict, TrainJobs, label, meta
from stasis.plugin.cluster import Cluster, asked, user
from stasis.plugin.names import KUEUE_QUEUE
from stasis.plugin.snapshot import Snapshot, checkpoints
from stasis.plugin.standing import gate

_TRIES = 5
_FOREIGN_MANAGERS = re.compile(rf"{re.escape(PATCH_MANAGER)}|kueue\.x-k8s\.io/.*")  # they patch a fork by themselves


def patch(cluster: Cluster, name: str, annotations: Mapping[str, str | None], *, suspend: bool | None = None) -> None:
    """A TrainJob's suspend and annotations in one write; an annotation that is None is removed."""
    change: dict[str, Any] = {"metadata": {"annotations": dict(annotations)}}
    if suspend is not None:
        change["spec"] = {"suspend": suspend}
    with asked(f"TrainJob {cluster.namespace}/{name}"):
        cluster.client.patch(TrainJobs, name, change, namespace=cluster.namespace, patch_type=PatchType.MERGE)


def suspend(cluster: Cluster, snapshot: Snapshot, *, discard: bool) -> None:
    """Raises UsageError where nothing would be saved, or Kueue would undo it."""
    refuse_kueue(snapshot, active=False)
    if not discard and not snapshot.policy_in_force:
        later = " yet: its label counts from the next resume" if snapshot.policy else ""
        raise UsageError(
            f"TrainJob {snapshot.name} is not enabled{later}; a suspend would lose what it has done",
            remedy="suspend it with --discard, or let it run to its own checkpoint first",
        )
    patch(cluster, snapshot.name, {DISCARD: "true" if discard else None}, suspend=True)


def resume(cluster: Cluster, snapshot: Snapshot) -> None:
    refuse_kueue(snapshot, active=True)
    if snapshot.jobset_suspended and not snapshot.suspend:  # its last resume failed: only a change asks for another
        patch(cluster, snapshot.name, {}, suspend=True)
    patch(cluster, snapshot.name, {DISCARD: None, FROM: None}, suspend=False)


def refuse_kueue(snapshot: Snapshot, *, active: bool) -> None:
    """Kueue alone suspends and starts the jobs of its queues: it undoes a suspend by anybody else at once."""
    queue = label(snapshot.trainjob, KUEUE_QUEUE)
    if not queue:
        return
    selector = f"kueue.x-k8s.io/job-uid={snapshot.uid}"
    word = str(active).lower()
    raise UsageError(
        f"TrainJob {snapshot.name} is managed by Kueue (queue {queue}), which undoes a suspend or a resume by hand",
        remedy=f"set active of its Workload: kubectl patch $(kubectl get workloads -l {selector} -o name)"
        f""" --type=merge -p '{{"spec":{{"active":{word}}}}}'""",
    )


def choose(cluster: Cluster, snapshot: Snapshot, checkpoint: TrainJobCheckpoint) -> None:
    """Ask that a suspended job's next resume begins from this checkpoint. Raises UsageError where it cannot."""
    if not snapshot.jobset_suspended:
        raise UsageError(
            f"TrainJob {snapshot.name} is not suspended",
            remedy=f"kubectl stasis suspend {snapshot.name} --wait, or --discard what it has done",
        )
    restorable(checkpoint)
    state = gate(snapshot)
    current = state.checkpoint if isinstance(state, Held) else ""
    if current != checkpoint.metadata.name:
        value = f"{checkpoint.metadata.name}/{current}" if current else checkpoint.metadata.name
        patch(cluster, snapshot.name, {FROM: value})


def restorable(checkpoint: TrainJobCheckpoint) -> None:
    name = checkpoint.metadata.name
    for bad in (ConditionType.LOST, ConditionType.EXPIRED, ConditionType.FAILED):
        if checkpoint.condition(bad):
            raise UsageError(f"checkpoint {name} is {bad.lower()}", remedy="choose another one: kubectl stasis ls")
    if not checkpoint.condition(ConditionType.COMPLETE):
        raise UsageError(f"checkpoint {name} is not complete", remedy="wait for it, or choose another one")


def checkpoint(cluster: Cluster, snapshot: Snapshot) -> str:
    """Make a TrainJobCheckpoint of a job that goes on; its name."""
    if not snapshot.policy_in_force:
        raise UsageError(
            f"TrainJob {snapshot.name} is not enabled",
            remedy=f"label it before it is made or resumed: {POLICY_LABEL}=default",
        )
    if snapshot.suspend or snapshot.jobset_suspended:
        raise UsageError(f"TrainJob {snapshot.name} is suspended, or to be: there is nothing to checkpoint")
    by = user(cluster)
    for _ in range(_TRIES):
        name = _next_name(snapshot.name, [c.metadata.name for c in checkpoints(cluster)])
        labels = TrainJobCheckpoint.labels_for(snapshot.name, snapshot.uid)
        job = {"name": snapshot.name, "uid": snapshot.uid}
        spec = {"trainJob": job, "kind": str(CheckpointKind.CHECKPOINT), "requestedBy": by}
        body = Checkpoints.from_dict(
            {"metadata": {"name": name, "namespace": cluster.namespace, "labels": labels}, "spec": spec}
        )
        try:
            with asked(f"TrainJobCheckpoint {cluster.namespace}/{name}"):
                cluster.client.create(body)
            return name
        except Conflict:
            continue
    raise StasisError("others make checkpoints of the same job all the time", remedy="try again")


def _next_name(job: str, taken: list[str]) -> str:
    numbers = [int(name[len(job) + 1 :]) for name in taken if re.fullmatch(rf"{re.escape(job)}-[0-9]{{1,9}}", name)]
    return f"{job}-{1 + max(numbers, default=0)}"


def delete(cluster: Cluster, name: str) -> None:
    with asked(f"TrainJobCheckpoint {cluster.namespace}/{name}"):
        cluster.client.delete(Checkpoints, name, namespace=cluster.namespace)


def ask_check(cluster: Cluster, name: str) -> str:
    """Ask for a preflight of a running job; the word by which the answer is known."""
    nonce = secrets.token_hex(5)
    patch(cluster, name, {CHECK: nonce})
    return nonce


def fork(
    cluster: Cluster,
    name: str,
    origin: TrainJobCheckpoint,
    template: Mapping[str, Any],
    *,
    share_volumes: bool,
) -> None:
    """Make a suspended TrainJob of the template's spec, to be resumed from another job's checkpoint."""
    spec = copy.deepcopy(dict(template["spec"])) | {"suspend": True}
    patches = [p for p in spec.pop("runtimePatches", ()) if not _FOREIGN_MANAGERS.fullmatch(p.get("manager", ""))]
    if patches:
        spec["runtimePatches"] = patches
    labels = dict(meta(template).get("labels") or {})
    labels.setdefault(POLICY_LABEL, (origin.status.policy if origin.status else "") or "default")
    annotations = {FROM: origin.metadata.name} | ({SHARE_VOLUMES: "true"} if share_volumes else {})
    metadata = {"name": name, "namespace": cluster.namespace, "labels": labels, "annotations": annotations}
    body = TrainJobs.from_dict({"metadata": metadata, "spec": spec})
    try:
        with asked(f"TrainJob {cluster.namespace}/{name}"):
            cluster.client.create(body)
    except Conflict as error:
        raise UsageError(f"TrainJob {name} is there already", remedy="give the fork another name") from error


def source(cluster: Cluster, origin: TrainJobCheckpoint) -> Any:
    """The TrainJob that a checkpoint is of."""
    job = origin.spec.train_job
    remedy = "give the fork's TrainJob by -f FILE"
    try:
        with asked(f"TrainJob {cluster.namespace}/{job.name}"):
            found = cluster.client.get(TrainJobs, job.name, namespace=cluster.namespace)
    except NotFound as error:
        raise NotFound(error.message, remedy=remedy) from error
    if meta(found)["uid"] != job.uid:
        raise UsageError(f"TrainJob {job.name} is another one than the checkpoint's", remedy=remedy)
    return found


def template(file: TextIO) -> dict[str, Any]:
    """A TrainJob from a file. Raises UsageError for anything else."""
    try:
        found = yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise UsageError(f"{file.name} is no YAML: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != "TrainJob" or not isinstance(found.get("spec"), dict):
        raise UsageError(f"{file.name} holds no TrainJob")
    return found


def written_volumes(snapshot: Snapshot) -> list[str]:
    """Claims that the pods of a job may write to."""
    claims = set()
    for pod in snapshot.pods:
        volumes = (pod.get("spec") or {}).get("volumes") or ()
        for volume in volumes:
            claim = volume.get("persistentVolumeClaim") or {}
            if claim and not claim.get("readOnly"):
                claims.add(str(claim["claimName"]))
    return sorted(claims)
