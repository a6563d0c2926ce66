"""All that the API server has of one TrainJob, as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightkube.resources.core_v1 import Namespace, Pod

from stasis.api.names import JOBSET_NAME_LABEL, POLICY_LABEL, TRAINJOB_LABEL
from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.errors import Denied, NotFound
from stasis.kube.client import Checkpoints, JobSets, TrainJobs, label, meta
from stasis.plugin.cluster import Cluster, asked


@dataclass(frozen=True)
class Snapshot:
    """`checkpoints`: those of this TrainJob's UID, oldest first; `namesakes`: those of jobs before it under its name.
    `namespace_policy` is what its namespace's label says."""

    trainjob: Mapping[str, Any]
    jobset: Mapping[str, Any] | None
    pods: tuple[Mapping[str, Any], ...]
    checkpoints: tuple[TrainJobCheckpoint, ...] = ()
    namesakes: tuple[TrainJobCheckpoint, ...] = ()
    namespace_policy: str = ""

    @property
    def name(self) -> str:
        return str(meta(self.trainjob)["name"])

    @property
    def uid(self) -> str:
        return str(meta(self.trainjob)["uid"])

    @property
    def suspend(self) -> bool:
        return bool(self.trainjob.get("spec", {}).get("suspend"))

    @property
    def jobset_suspended(self) -> bool:
        return self.jobset is not None and bool(self.jobset.get("spec", {}).get("suspend"))

    @property
    def policy(self) -> str:
        """Which is asked for now: by the job, else by its namespace."""
        return label(self.trainjob, POLICY_LABEL) or self.namespace_policy

    @property
    def policy_in_force(self) -> str:
        """Which its JobSet was made or last resumed with."""
        return label(self.jobset, POLICY_LABEL) if self.jobset is not None else ""


def take(cluster: Cluster, name: str) -> Snapshot:
    """Raises NotFound where there is no such TrainJob."""
    client, namespace = cluster.client, cluster.namespace
    try:
        with asked(f"TrainJob {namespace}/{name}"):
            trainjob = client.get(TrainJobs, name, namespace=namespace)
    except NotFound as error:
        raise NotFound(error.message, remedy="kubectl get trainjobs -A") from error
    try:
        with asked(f"JobSet {namespace}/{name}"):
            jobset = client.get(JobSets, name, namespace=namespace)
    except NotFound:
        jobset = None
    with asked(f"pods of {namespace}/{name}"):
        pods = tuple(p.to_dict() for p in client.list(Pod, namespace=namespace, labels={JOBSET_NAME_LABEL: name}))
    found = checkpoints(cluster, name)
    uid = meta(trainjob)["uid"]
    return Snapshot(
        trainjob,
        jobset,
        pods,
        tuple(c for c in found if c.spec.train_job.uid == uid),
        tuple(c for c in found if c.spec.train_job.uid != uid),
        _namespace_policy(cluster),
    )


def checkpoints(cluster: Cluster, trainjob: str | None = None) -> list[TrainJobCheckpoint]:
    """Of one TrainJob's name, or of all; oldest first."""
    labels: Any = {TRAINJOB_LABEL: trainjob} if trainjob else None
    with asked("TrainJobCheckpoints"):
        listed = list(cluster.client.list(Checkpoints, namespace=cluster.namespace, labels=labels))
    found = [TrainJobCheckpoint.from_dict(item) for item in listed]
    return sorted(found, key=lambda c: (c.spec.train_job.name, c.metadata.creation_timestamp, serial(c)))


def checkpoint(cluster: Cluster, name: str) -> TrainJobCheckpoint:
    """Raises NotFound."""
    try:
        with asked(f"TrainJobCheckpoint {cluster.namespace}/{name}"):
            found = cluster.client.get(Checkpoints, name, namespace=cluster.namespace)
    except NotFound as error:
        raise NotFound(error.message, remedy="kubectl stasis ls") from error
    return TrainJobCheckpoint.from_dict(found)


def serial(checkpoint: TrainJobCheckpoint) -> int:
    return (checkpoint.status.serial if checkpoint.status else None) or 0


def _namespace_policy(cluster: Cluster) -> str:
    try:
        with asked("namespace"):
            return label(cluster.client.get(Namespace, cluster.namespace).to_dict(), POLICY_LABEL)
    except (Denied, NotFound):  # a user may see objects in a namespace, but not the namespace
        return ""
