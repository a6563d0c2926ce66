"""What is kept of what was saved: published by a tag, given up when its time is over or room is needed, removed."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from lightkube import AsyncClient
from lightkube.types import PatchType

from stasis.api.v1alpha1.trainjobcheckpoint import HOLD_FINALIZER
from stasis.controllers import status, stored
from stasis.controllers.choices import Patch
from stasis.controllers.events import Teller
from stasis.controllers.live import Live
from stasis.controllers.metrics import Metrics
from stasis.controllers.registry import Registry
from stasis.controllers.seen import Seen
from stasis.core import actions as a
from stasis.core.retention import over_quota
from stasis.errors import NotFound, StoreError
from stasis.kube.client import Checkpoints, meta, translated

log = logging.getLogger(__name__)


class Keeping:
    """`patch` as that of Choices."""

    def __init__(
        self, client: AsyncClient, seen: Seen, registry: Registry, teller: Teller, metrics: Metrics, patch: Patch
    ) -> None:
        self._client = client
        self._seen = seen
        self._registry = registry
        self._teller = teller
        self._metrics = metrics
        self._patch = patch

    async def publish(self, live: Live, action: a.Publish) -> None:
        checkpoint = live.checkpoint(action.checkpoint)
        found = checkpoint["status"]
        config = {
            "trainJob": checkpoint["spec"]["trainJob"],
            "namespace": live.key[0],
            "checkpoint": action.checkpoint,
            "container": found.get("container", ""),
            "created": found.get("completionTime") or status.now(),
            "worldSize": found["worldSize"],
        }
        put = await self._registry.call(
            live,
            found["repository"],
            stored.put_tag,
            action.checkpoint,
            meta(checkpoint)["uid"],
            status.manifests_of(checkpoint),
            config,
        )
        ranks = [
            {
                **rank,
                "addresses": list(put.addresses.get(rank["rank"], ())),
                "memoryBytes": put.memory.get(rank["rank"], 0),
                "storedBytes": put.stored.get(rank["rank"], 0),
            }
            for rank in found.get("ranks") or ()
        ]
        change = {
            "tag": action.checkpoint,
            "index": put.index,
            "ranks": ranks,
            "memoryBytes": sum(put.memory.values()),
            "storedBytes": put.total,
            "size": status.size(put.total),
        }
        await self._patch(checkpoint, change)

    async def orphan(self, live: Live, action: a.Orphan) -> None:
        checkpoint = live.checkpoint(action.checkpoint)
        await self._patch(checkpoint, status.orphaned(checkpoint))

    async def expire(self, live: Live, action: a.Expire) -> None:
        """Said in the status first: that is refused where somebody has come to need it meanwhile."""
        checkpoint = live.checkpoint(action.checkpoint)
        await self._patch(checkpoint, status.expired(checkpoint, action.message))
        await self._delete(action.checkpoint, meta(checkpoint)["namespace"], action.message)

    async def _delete(self, name: str, namespace: str, why: str) -> None:
        with contextlib.suppress(NotFound), translated(f"checkpoint {namespace}/{name}"):
            await self._client.delete(Checkpoints, name, namespace=namespace)
        log.info("checkpoint %s/%s is deleted: %s", namespace, name, why)

    async def make_room(self, live: Live) -> str:
        """Within what the policy allows the namespace; why there is none, else empty."""
        limit = live.policy.retention.max_bytes_int
        if limit is None:
            return ""
        there = self._seen.stored(live.key[0])
        gone, fits = over_quota(there, limit)
        for name in gone:
            await self._delete(name, live.key[0], f"the namespace's checkpoints take more than {status.size(limit)}")
        taken = sum(one.size for one in there if one.name not in gone)
        return (
            ""
            if fits
            else f"the namespace's checkpoints take {status.size(taken)}, its policy allows {status.size(limit)}"
        )

    async def let_go(self, live: Live, action: a.LetGo) -> None:
        checkpoint = live.checkpoint(action.checkpoint)
        found = checkpoint.get("status") or {}
        if manifests := await self._unshared(live, checkpoint):
            try:
                await self._registry.call(live, found["repository"], stored.remove, found.get("index", ""), manifests)
            except StoreError as error:
                self._metrics.collection_failures.inc()
                if error.retryable:
                    raise
                text = f"{action.checkpoint} is deleted, its bytes stay in {found['repository']}: {error}"
                await self._teller.tell(live.job, "NotRemoved", text, warning=True)
        left = [name for name in meta(checkpoint).get("finalizers") or () if name != HOLD_FINALIZER]
        change = {"metadata": {"resourceVersion": meta(checkpoint)["resourceVersion"], "finalizers": left}}
        namespace = meta(checkpoint)["namespace"]
        try:
            with translated(f"checkpoint {action.checkpoint}"):
                await self._client.patch(
                    Checkpoints, action.checkpoint, change, namespace=namespace, patch_type=PatchType.MERGE
                )
        except NotFound:
            pass

    async def _unshared(self, live: Live, checkpoint: Any) -> dict[int, str]:
        """Manifests of a checkpoint that is being deleted, but for those that copies of it refer to (rule 31)."""
        manifests, namespace = status.manifests_of(checkpoint), meta(checkpoint)["namespace"]
        if not manifests:
            return {}
        shared: set[str] = set()
        with translated(f"checkpoints of {namespace}"):
            async for other in self._client.list(Checkpoints, namespace=namespace):
                if meta(other)["uid"] != meta(checkpoint)["uid"]:
                    shared.update(status.manifests_of(other).values())
        return {} if shared & set(manifests.values()) else manifests
