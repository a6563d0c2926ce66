"""One TrainJob with all that belongs to it, read from the API server now: what is decided upon."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from lightkube import ApiError, AsyncClient
from lightkube.types import PatchType

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicySpec
from stasis.api.v1alpha1.trainjobcheckpoint import HOLD_FINALIZER, TrainJobCheckpoint
from stasis.controllers.description import Description
from stasis.controllers.observe import checkpoint_of, jobset_of, policy_name, policy_of
from stasis.controllers.seen import Key, Seen, in_order, pods_of
from stasis.core.plan import Kind
from stasis.core.view import View
from stasis.kube.client import Checkpoints, JobSets, Pods, TrainJobs, label, meta, status_code, translated
from stasis.kube.ranks import is_rank


@dataclass(frozen=True)
class Live:
    key: Key
    job: Any | None
    jobset: Any | None
    pods: dict[str, Any]  # by UID
    checkpoints: dict[str, Any]  # by name
    policy_name: str
    policy: CheckpointPolicySpec
    view: View

    def checkpoint(self, name: str) -> Any:
        return self.checkpoints[name]

    def description(self, name: str, op: str) -> Description:
        operations = self.checkpoints[name]["status"]["operations"]
        return Description.from_json(next(entry["spec"] for entry in operations if entry["op"] == op))

    def known_addresses(self, pods: dict[int, str]) -> dict[int, tuple[str, ...]]:
        """By which addresses the processes in these pods (rank -> UID) know the ranks, where they were restored."""
        for checkpoint in self.checkpoints.values():
            for entry in (checkpoint.get("status") or {}).get("operations") or ():
                if entry["kind"] != str(Kind.RESTORE):
                    continue
                description = Description.from_json(entry["spec"])
                if set(pods.values()) <= set(description.pods.values()):
                    return description.addresses
        return {}


async def read(client: AsyncClient, seen: Seen, key: Key) -> Live:
    """Raises Unavailable or Denied."""
    live = await _read(client, seen, key)
    while vain := _in_vain(live.view):  # what they ask for may have been made after it was looked for
        live = await _read(client, seen, key)
        if _in_vain(live.view) <= vain:
            break
    return live


def _in_vain(view: View) -> set[str]:
    """Checkpoints that are asked for of a job that is not there."""
    there = view.job.uid if view.job is not None and view.jobset is not None else None
    return {checkpoint.name for checkpoint in view.checkpoints if checkpoint.waiting and checkpoint.job != there}


async def _read(client: AsyncClient, seen: Seen, key: Key) -> Live:
    """The JobSet before the checkpoints: see `actions.Mark`."""
    namespace, name = key
    with translated(f"trainjob {namespace}/{name}"):
        job = await _get(client, TrainJobs, namespace, name)
        jobset = await _get(client, JobSets, namespace, name)
        enabled = jobset is not None and bool(label(jobset, names.POLICY_LABEL))
        pods = {}
        async for pod in client.list(Pods, namespace=namespace, labels={names.JOBSET_NAME_LABEL: name}):
            if is_rank(pod):
                pods[meta(pod)["uid"]] = pod
        checkpoints = await _checkpoints(client, seen, key)
    in_view = in_order(checkpoint_of(c, pods_of(c)) for c in checkpoints.values())
    policy_named = policy_name(label(jobset, names.POLICY_LABEL) if enabled else "", in_view)
    policy = seen.policy_of(namespace, policy_named)
    view = View(
        now=time.time(),
        job=None if job is None else seen.job(key, job),
        jobset=jobset_of(jobset) if enabled else None,
        pods=tuple(seen.pod_now(pod) for pod in pods.values()),
        checkpoints=in_view,
        policy=policy_of(policy),
    )
    return Live(key, job, jobset, pods, checkpoints, policy_named, policy, view)


async def _get(client: AsyncClient, kind: Any, namespace: str, name: str) -> Any | None:
    """None only where the server says that this object is not there, and not where it does not know the kind."""
    try:
        return await client.get(kind, name, namespace=namespace)
    except ApiError as error:
        details = error.status.details
        if status_code(error) == 404 and details is not None and details.name == name:
            return None
        raise


async def _checkpoints(client: AsyncClient, seen: Seen, key: Key) -> dict[str, Any]:
    """Those of the TrainJob's name. One that a user has made gets the labels and the finalizer that ours have."""
    namespace, job = key
    found: dict[str, Any] = {}
    async for checkpoint in client.list(Checkpoints, namespace=namespace, labels={names.TRAINJOB_LABEL: job}):
        found[meta(checkpoint)["name"]] = checkpoint
    for name in seen.checkpoint_names(key) - set(found):
        made = await _get(client, Checkpoints, namespace, name)
        if made is None or "deletionTimestamp" in meta(made):
            continue
        labels = TrainJobCheckpoint.labels_for(job, made["spec"]["trainJob"]["uid"])
        finalizers = sorted({*(meta(made).get("finalizers") or ()), HOLD_FINALIZER})
        about = {"resourceVersion": meta(made)["resourceVersion"], "labels": labels, "finalizers": finalizers}
        found[name] = await client.patch(
            Checkpoints, name, {"metadata": about}, namespace=namespace, patch_type=PatchType.MERGE
        )
    return found
