"""TrainJobs of enabled jobs: Trainer hands no label down, so a runtimePatch of ours labels the JobSet."""

from __future__ import annotations

import copy
from typing import Any

from stasis.api.names import PATCH_MANAGER, POLICY_LABEL
from stasis.webhook.cluster import Cluster
from stasis.webhook.review import Answer, Request


async def trainjobs(request: Request, cluster: Cluster) -> Answer:
    """On CREATE, and on a resume while no pod is left: Trainer refuses a change of runtimePatches at any other time.
    The job's own label counts before its namespace's; an empty one switches Stasis off for the job."""
    metadata = request.object.get("metadata") or {}
    labels = metadata.get("labels") or {}
    if metadata.get("deletionTimestamp") or (request.operation == "UPDATE" and not _resumes(request)):
        return Answer()
    policy = labels[POLICY_LABEL] if POLICY_LABEL in labels else await cluster.policy_of_namespace(request.namespace)
    if not policy:
        return Answer()
    job = copy.deepcopy(dict(request.object))
    patches = job["spec"].setdefault("runtimePatches", [])
    template = {"metadata": {"labels": {POLICY_LABEL: policy}}}
    wanted = {"manager": PATCH_MANAGER, "trainingRuntimeSpec": {"template": template}}
    mine = next((patch for patch in patches if patch.get("manager") == PATCH_MANAGER), None)
    if mine is None:
        patches.append(wanted)
    else:  # Trainer adds the time of its last change
        mine["trainingRuntimeSpec"] = wanted["trainingRuntimeSpec"]
    missing = await cluster.policy(request.namespace, policy) is None
    warning = (
        f"there is no CheckpointPolicy {policy!r} in namespace {request.namespace}: the job cannot be checkpointed"
    )
    return Answer(job, (warning,) if missing else (), notes={"policy": policy})


def _resumes(request: Request) -> bool:
    was, wanted = (bool((o.get("spec") or {}).get("suspend")) for o in (request.old, request.object))
    jobs: list[dict[str, Any]] = (request.object.get("status") or {}).get("jobsStatus") or []
    return was and not wanted and not any(job.get("active") for job in jobs)
