"""Preflights that users ask for: what stands against a checkpoint of a training as it runs; nothing is touched."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from stasis.api import names
from stasis.controllers.agents import Agents
from stasis.controllers.description import container_id
from stasis.controllers.events import Teller
from stasis.controllers.live import Live
from stasis.controllers.observe import unprepared
from stasis.controllers.seen import Key, Seen
from stasis.core.view import Pod
from stasis.errors import Finding, StasisError
from stasis.kube.client import meta

log = logging.getLogger(__name__)

AT_ONCE = 32  # agents that are asked at the same time
MAX_ANSWER = 200_000  # bytes: all annotations of an object may take 256 KiB
RETRY = 5.0  # seconds

NOT_ENABLED = ("it is not enabled", f"label it {names.POLICY_LABEL}=default; the label counts from its next resume")
NOT_RUNNING = ("nothing of it runs", "ask again when it runs")


class Checks:
    """Beside the work queue, since agents may take their time. An answer is an Event of a name that is known before: of
    two controllers one writes it."""

    def __init__(self, agents: Agents, teller: Teller, seen: Seen, again: Callable[[Key], None]) -> None:
        self._agents = agents
        self._teller = teller
        self._seen = seen
        self._again = again
        self._tasks: dict[tuple[Key, str], asyncio.Task[None]] = {}
        self._asking = asyncio.Semaphore(AT_ONCE)

    def begin(self, live: Live, nonce: str) -> None:
        """Answer what was asked for by this name, if that is not being done."""
        index = (live.key, nonce)
        if index not in self._tasks:
            self._tasks[index] = asyncio.create_task(self._answer(live, nonce))
            self._tasks[index].add_done_callback(lambda _: self._tasks.pop(index))

    async def _answer(self, live: Live, nonce: str) -> None:
        found = await self._ask(live)
        reason, message = in_words(found)
        try:
            await self._teller.write(
                live.job,
                f".check-{nonce}",
                reason,
                message,
                warning=reason != "Checked",
                annotations={names.FINDINGS: bounded(found)},
            )
            self._seen.answer(live.key, nonce)
        except StasisError as error:
            log.warning("a check was not answered: %s", error)
            asyncio.get_running_loop().call_later(RETRY, self._again, live.key)

    async def _ask(self, live: Live) -> dict[str, Any]:
        if live.view.jobset is None:
            return _unanswered(*NOT_ENABLED)
        running = {pod.rank: pod for pod in live.view.pods if pod.running and not pod.terminating}
        if not running:
            return _unanswered(*NOT_RUNNING)
        ranks = range(live.view.jobset.ranks)
        return {**_unanswered(), "ranks": await asyncio.gather(*(self._rank(live, n, running.get(n)) for n in ranks))}

    async def _rank(self, live: Live, rank: int, pod: Pod | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"rank": rank, "pod": "", "node": "", "findings": [], "error": "", "remedy": ""}
        if pod is None:
            return answer | {"error": "it does not run"}
        obj = live.pods[pod.uid]
        node = str(obj["spec"]["nodeName"])
        answer |= {"pod": meta(obj)["name"], "node": node}
        if cause := unprepared(obj):
            remedy = f"see to it that the pod can be prepared; with {names.POLICY_LABEL} it is at its next start"
            return answer | {"findings": [Finding(cause, remedy).as_dict()]}
        try:
            async with self._asking:
                told = await self._agents.post(node, "/v1/check", {"container_id": container_id(obj)})
        except StasisError as error:
            return answer | {"error": error.message, "remedy": error.remedy}
        return answer | {"findings": told["findings"]}


def _unanswered(error: str = "", remedy: str = "") -> dict[str, Any]:
    return {"ranks": [], "error": error, "remedy": remedy}


def in_words(found: Mapping[str, Any]) -> tuple[str, str]:
    """Reason and message of the event."""
    if found["error"]:
        return "CheckFound", f"not checked: {found['error']}. Remedy: {found['remedy']}"
    words = []
    for rank in found["ranks"]:
        words += [f"rank {rank['rank']}: {Finding(**finding)}" for finding in rank["findings"]]
        words += [f"rank {rank['rank']} could not be checked: {rank['error']}"] if rank["error"] else []
    if words:
        return "CheckFound", "; ".join(words)
    return "Checked", f"nothing stands against a checkpoint of its {len(found['ranks'])} ranks"


def bounded(found: Mapping[str, Any]) -> str:
    """As JSON, with so many findings of each rank as there is room for."""
    most = max((len(rank["findings"]) for rank in found["ranks"]), default=0)
    while True:
        ranks = [{**rank, "findings": rank["findings"][:most]} for rank in found["ranks"]]
        text = json.dumps({**found, "ranks": ranks}, separators=(",", ":"))
        if len(text) <= MAX_ANSWER or most <= 1:
            return text
        most //= 2
