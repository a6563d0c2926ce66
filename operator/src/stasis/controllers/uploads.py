"""Checkpoints that are on their nodes' disks alone: the agents are asked to upload them until the registry has all, or
it is clear that it never will."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from stasis.api.v1alpha1.trainjobcheckpoint import ConditionType
from stasis.controllers import status
from stasis.controllers.agents import Agents
from stasis.controllers.choices import Patch
from stasis.controllers.description import Description, making
from stasis.controllers.events import Teller
from stasis.controllers.live import Live
from stasis.controllers.observe import condition
from stasis.controllers.registry import Registry
from stasis.controllers.seen import Key
from stasis.core import actions as a
from stasis.core.durability import Standing, Told, Upload, standing
from stasis.core.lineage import unusable
from stasis.errors import StasisError, Unavailable
from stasis.kube.client import meta

log = logging.getLogger(__name__)


class Uploads:
    """Beside the work queue, since agents may take their time. Since when a node does not answer is known to this
    process alone: another one has the same patience again."""

    def __init__(
        self, agents: Agents, registry: Registry, teller: Teller, patch: Patch, again: Callable[[Key], None]
    ) -> None:
        self._agents = agents
        self._registry = registry
        self._teller = teller
        self._patch = patch
        self._again = again
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the checkpoint's UID
        self._silent: dict[tuple[str, str], float] = {}  # UID, node -> since when, in seconds of time.monotonic
        self._awaited: set[str] = set()  # UIDs

    async def go_on(self, live: Live, action: a.Upload) -> None:
        uid = meta(live.checkpoint(action.checkpoint))["uid"]
        if uid not in self._tasks:
            self._tasks[uid] = asyncio.create_task(self._see_to(live, action.checkpoint))
            self._tasks[uid].add_done_callback(lambda _: self._tasks.pop(uid))

    async def _see_to(self, live: Live, name: str) -> None:
        checkpoint = live.checkpoint(name)
        try:
            found = standing(await self._ask(live, checkpoint), float(live.policy.timeout_seconds))
            await self._note(live, checkpoint, name, found)
        except StasisError as error:  # it is looked at again soon
            log.warning("checkpoint %s/%s: %s", live.key[0], name, error)

    async def _note(self, live: Live, checkpoint: Any, name: str, found: Standing) -> None:
        uid = meta(checkpoint)["uid"]
        if found.durable:
            await self._patch(checkpoint, status.uploaded(checkpoint))
            await self._teller.tell(live.job, "Durable", f"checkpoint {name} is in the registry")
        elif found.lost:
            await self._lose(live, checkpoint, name, found.lost)
        else:
            if found.message != condition(checkpoint, ConditionType.DURABLE).get("message"):
                await self._patch(checkpoint, status.uploading(checkpoint, found.message))
            if _awaited(live, name) and uid not in self._awaited:
                self._awaited.add(uid)
                text = f"resumed from checkpoint {name} as soon as the registry has it: {found.message}"
                await self._teller.tell(live.job, "NotDurable", text)
            return
        self._awaited.discard(uid)
        self._silent = {index: since for index, since in self._silent.items() if index[0] != uid}
        self._again(live.key)

    async def _lose(self, live: Live, checkpoint: Any, name: str, why: str) -> None:
        """The job that is suspended in it waits for its user, or begins anew: as its policy says of what cannot be
        restored."""
        stands = next(one.stands for one in live.view.checkpoints if one.name == name)
        generation = int(meta(live.job).get("generation", 0)) if live.job is not None and stands else None
        await self._patch(checkpoint, status.lost(checkpoint, why, generation))
        job = checkpoint["spec"]["trainJob"]["uid"]
        others = [c.name for c in live.view.checkpoints if c.job == job and c.name != name and not unusable(c)]
        instead = f"the last one before it is {others[-1]}" if others else "there is no other one"
        await self._teller.tell(live.job, "Lost", f"checkpoint {name} is lost: {why}; {instead}", warning=True)

    async def _ask(self, live: Live, checkpoint: Any) -> dict[int, Told]:
        entry, manifests = making(checkpoint), status.manifests_of(checkpoint)
        nodes = Description.from_json(entry["spec"]).nodes
        body = {
            "op": entry["op"],
            "repository": checkpoint["status"]["repository"],
            "credentials": await self._registry.credentials(live),
        }
        by_node: dict[str, dict[int, str]] = {}
        for rank, digest in manifests.items():
            by_node.setdefault(nodes[rank], {})[rank] = digest
        uid = meta(checkpoint)["uid"]
        answers = await asyncio.gather(*(self._node(uid, node, body, ranks) for node, ranks in by_node.items()))
        return {rank: told for answer in answers for rank, told in answer.items()}

    async def _node(self, uid: str, node: str, body: Mapping[str, Any], ranks: Mapping[int, str]) -> dict[int, Told]:
        asked = {**body, "ranks": {str(rank): digest for rank, digest in ranks.items()}}
        try:
            answer = (await self._agents.post(node, "/v1/upload", asked))["ranks"]
            told = {
                rank: Told(node, Upload(answer[str(rank)]["state"]), str(answer[str(rank)]["message"]))
                for rank in ranks
            }
        except Unavailable as error:
            silent = time.monotonic() - self._silent.setdefault((uid, node), time.monotonic())
            return dict.fromkeys(ranks, Told(node, None, error.message, silent))
        except StasisError as error:  # it answers, and does not do it
            told = dict.fromkeys(ranks, Told(node, Upload.UNDER_WAY, error.message))
        self._silent.pop((uid, node), None)
        return told


def _awaited(live: Live, name: str) -> bool:
    """Whether a job that is suspended in this checkpoint is to run again."""
    job, jobset = live.view.job, live.view.jobset
    stands = next(one.stands for one in live.view.checkpoints if one.name == name)
    return stands and job is not None and jobset is not None and jobset.suspend and not job.suspend
