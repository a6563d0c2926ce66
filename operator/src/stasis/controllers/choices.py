"""Resuming from another checkpoint than the last one: of the same job, or, as a fork, of another one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from lightkube import AsyncClient

from stasis.api import names
from stasis.api.v1alpha1.trainjobcheckpoint import HOLD_FINALIZER, CheckpointKind, TrainJobCheckpoint
from stasis.controllers import status
from stasis.controllers.events import Teller
from stasis.controllers.live import Live
from stasis.controllers.observe import FORK_OF, checkpoint_of
from stasis.controllers.seen import Seen, pods_of
from stasis.core import actions as a
from stasis.core.lineage import unusable
from stasis.errors import NotFound, Unavailable
from stasis.kube.client import Checkpoints, Pods, annotation, meta, translated

MANY = 10  # checkpoints that are named in one event

Patch = Callable[[Any, dict[str, Any]], Awaitable[None]]


class Choices:
    """`patch` changes the status of a checkpoint, and is refused where it is no longer as it was read."""

    def __init__(self, client: AsyncClient, seen: Seen, teller: Teller, patch: Patch) -> None:
        self._client = client
        self._seen = seen
        self._teller = teller
        self._patch = patch

    async def choose(self, live: Live, action: a.Choose) -> None:
        checkpoint = live.checkpoint(action.checkpoint)
        await self._patch(checkpoint, status.chosen(checkpoint))

    async def go_back(self, live: Live, action: a.GoBack) -> None:
        checkpoint = live.checkpoint(action.checkpoint)
        await self._patch(checkpoint, status.gone_back(checkpoint))
        text = f"{action.lost}: all ranks go back to checkpoint {action.checkpoint}, the last one that is complete"
        await self._teller.tell(live.job, "RolledBack", text, warning=True)

    async def pass_over(self, live: Live, action: a.PassOver) -> None:
        checkpoint = live.checkpoint(action.checkpoint)
        await self._patch(checkpoint, status.passed_over(checkpoint, action.chosen))

    async def refuse(self, live: Live, action: a.RefuseChoice) -> None:
        if self._seen.refuses(live.key, action.message):
            text = f"not resumed from the checkpoint of annotation {names.FROM}: {action.message}"
            await self._teller.tell(live.job, "CheckpointRefused", text, warning=True)

    async def tell_namesakes(self, live: Live, action: a.TellNamesakes) -> None:
        known = ", ".join(action.checkpoints[-MANY:])
        more = "" if len(action.checkpoints) <= MANY else f" and {len(action.checkpoints) - MANY} older ones"
        text = f"starts anew; a job before it under its name has the checkpoints {known}{more}"
        suffix = f".namesakes-{meta(live.job)['uid']}"
        await self._teller.write(live.job, suffix, "CheckpointsOfNamesake", text, warning=True)
        self._seen.tell_of_namesakes(live.key)

    async def fork(self, live: Live, action: a.Fork) -> None:
        origin = await self._get(live, action.origin)
        if cause := await self._against(live, origin, action.origin):
            await self.refuse(live, a.RefuseChoice(cause))
            return
        assert origin is not None
        job = meta(live.job)
        name = f"{job['name']}-{action.serial}"
        body = {
            "metadata": {
                "name": name,
                "namespace": job["namespace"],
                "labels": TrainJobCheckpoint.labels_for(job["name"], job["uid"]),
                "finalizers": [HOLD_FINALIZER],
            },
            "spec": {
                "trainJob": {"name": job["name"], "uid": job["uid"]},
                "kind": str(CheckpointKind.SUSPEND),
                "requestedBy": f"{FORK_OF}{action.origin}",
                "policy": live.policy_name,
                "container": origin["status"].get("container", ""),
            },
        }
        with translated(f"checkpoint {name}"):
            made = await self._client.create(Checkpoints.from_dict(body))
        await self._patch(made, status.forked(made, action.serial, origin))
        # Whoever deletes the origin looks for copies of it after it is marked as being deleted, and keeps the bytes.
        again = await self._get(live, action.origin)
        if again is None or "deletionTimestamp" in meta(again):
            with translated(f"checkpoint {name}"):
                await self._client.delete(Checkpoints, name, namespace=job["namespace"])
            raise Unavailable(f"checkpoint {action.origin} was deleted meanwhile")

    async def _get(self, live: Live, name: str) -> Any | None:
        try:
            with translated(f"checkpoint {name}"):
                return await self._client.get(Checkpoints, name, namespace=live.key[0])
        except NotFound:
            return None

    async def _against(self, live: Live, origin: Any | None, name: str) -> str:
        """Why the job is no fork of that checkpoint; empty where it can be."""
        if origin is None:
            return f"there is no checkpoint {name} in this namespace"
        seen = checkpoint_of(origin, pods_of(origin))
        if cause := "is not in the registry yet" if seen.local else unusable(seen):
            return f"checkpoint {name} {cause}"
        if annotation(live.job, names.SHARE_VOLUMES) == "true":
            return ""
        source, written = origin["spec"]["trainJob"]["name"], set()
        with translated(f"pods of {source}"):
            selector = {names.JOBSET_NAME_LABEL: source}
            async for pod in self._client.list(Pods, namespace=live.key[0], labels=selector):
                if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                    written |= _written(pod["spec"])
        if shared := sorted(written & _claims_of(live.jobset)):
            volumes = f"it would write to volumes that TrainJob {source} writes to ({', '.join(shared)})"
            return f"{volumes}: suspend that, or accept it by annotation {names.SHARE_VOLUMES}"
        return ""


def _claims_of(jobset: Any) -> set[str]:
    jobs = jobset["spec"].get("replicatedJobs") or ()
    return _union(_written(job["template"]["spec"]["template"].get("spec") or {}) for job in jobs)


def _union(sets: Iterable[set[str]]) -> set[str]:
    return set().union(*sets)


def _written(pod: Any) -> set[str]:
    """Claims that a pod of this spec may write to."""
    claims = (volume.get("persistentVolumeClaim") for volume in pod.get("volumes") or ())
    return {str(claim["claimName"]) for claim in claims if claim and not claim.get("readOnly")}
