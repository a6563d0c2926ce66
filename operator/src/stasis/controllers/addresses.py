"""How the ranks of a restore keep their addresses, and who else has one of these by now (rule 24)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightkube import AsyncClient

from stasis.controllers.events import Teller
from stasis.errors import StasisError
from stasis.kube.client import Pods, meta, translated

log = logging.getLogger(__name__)


def means(known: Mapping[int, Sequence[str]], now: Mapping[int, str]) -> str:
    """As the status has it. `known`: by which addresses the processes know each rank; `now`: of its pod."""
    return "CNI" if all(list(known.get(rank, ()))[:1] == [address] for rank, address in now.items()) else "Translate"


class Neighbours:
    """Looks for them beside the restore, which does not wait for that."""

    def __init__(self, client: AsyncClient, teller: Teller) -> None:
        self._client = client
        self._teller = teller
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, job: Any, known: Mapping[int, Sequence[str]], now: Mapping[int, str]) -> None:
        """The restored processes go on taking the addresses of `known` for each other's: warn of pods that have one."""
        old = {address: rank for rank, addresses in known.items() for address in addresses}
        taken = {address: rank for address, rank in old.items() if address not in now.values()}
        if taken:
            task = asyncio.create_task(self._look(job, taken))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look(self, job: Any, old: Mapping[str, int]) -> None:
        try:
            for address, rank in sorted(old.items()):
                for name in await self._pods_at(address):
                    text = f"pod {name} has the former address {address} of rank {rank}: the ranks cannot reach it"
                    await self._teller.tell(job, "AddressTaken", text, warning=True)
        except StasisError as error:
            log.warning("who has the former addresses of %s is not known: %s", meta(job)["name"], error)

    async def _pods_at(self, address: str) -> list[str]:
        found = []
        with translated(f"pods at {address}"):
            async for pod in self._client.list(Pods, namespace="*", fields={"status.podIP": address}):
                if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                    found.append(f"{meta(pod)['namespace']}/{meta(pod)['name']}")
        return found
