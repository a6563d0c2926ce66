"""Uploads of what lies on this node's disk alone. The controller asks for them, again and again, until all is there:
it has the credentials, which are never written down here, and an agent that has just come knows no others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from stasis.agent import kept
from stasis.agent.journal import StateDir
from stasis.agent.kept import Kept
from stasis.core.durability import Need, Upload
from stasis.core.frames import Home
from stasis.errors import Corrupt, StasisError, UsageError
from stasis.store import credentials
from stasis.store.credentials import Credentials
from stasis.store.reference import Reference

log = logging.getLogger(__name__)

HOME = "home"  # kind of the entries that name an operation's TrainJobCheckpoint
AT_ONCE = 2  # ranks


class Uploads:
    """`need`: what the part of a checkpoint is kept for. `budget`: bytes that all
    may take together before those go that are in their registry; until then the newest of them stay, for later
    ones to be compared with."""

    def __init__(self, state: StateDir, need: Callable[[Home], Need], budget: int) -> None:
        kept.prepare(state)
        self._state = state
        self._need = need
        self._budget = budget
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="upload")
        self._begun: dict[Kept, Future[None]] = {}

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Go on with the uploads of an operation's ranks; rank (as text) -> how far each is. Raises UsageError."""
        try:
            op, repository, ranks = str(asked["op"]), str(asked["repository"]), dict(asked["ranks"])
            config = str(asked.get("credentials", ""))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this names no upload: {error!r}") from None
        where = Reference.parse(repository)
        allowed = credentials.find_in(config, where.host, where.name) if config else None
        here = {one.rank: one for one in kept.found(self._state) if one.op == op and one.repository == repository}
        answer = {}
        for rank, digest in ranks.items():
            one = here.get(int(rank)) if str(rank).isdecimal() else None
            state, why = self._go_on(one, allowed) if one is not None and one.digest == digest else (Upload.MISSING, "")
            answer[rank] = {"state": str(state), "message": why}
        return {"ranks": answer}

    def _go_on(self, one: Kept, allowed: Credentials | None) -> tuple[Upload, str]:
        """Begin it where it is not begun, or failed: what it failed by is told once."""
        with self._lock:
            begun = self._begun.get(one)
            if begun is None:
                self._begun[one] = self._pool.submit(self._upload, one, allowed)
            if begun is None or not begun.done():
                return Upload.UNDER_WAY, ""
            if (error := begun.exception()) is None:
                return Upload.DONE, ""
            if isinstance(error, Corrupt):
                return Upload.BROKEN, str(error)
            del self._begun[one]
            return Upload.UNDER_WAY, str(error)

    def _upload(self, one: Kept, allowed: Credentials | None) -> None:
        context = {"operation": one.op, "rank": one.rank}
        log.info("uploading to %s", one.repository, extra=context)
        try:
            kept.upload(self._state, one, allowed)
            if self._look(one) is Need.NONE:  # whoever has deleted it meanwhile found nothing there to remove
                kept.withdraw(one, allowed)
        except Exception as error:
            log.warning("not uploaded: %s", error, extra=context)
            raise
        log.info("uploaded", extra=context)

    def holds(self, op: str) -> bool:
        return any(one.op == op for one in kept.found(self._state))

    def sweep(self, at_work: Collection[str]) -> None:
        """Remove what is kept for nothing, but for these operations."""
        spare: list[Kept] = []
        for one in kept.found(self._state):
            if one.op in at_work:
                continue
            try:
                need = self._look(one)
            except StasisError as error:
                log.info("whether %s is needed is not known: %s", one.op, error)
                continue
            if need is Need.SPARE:
                spare.append(one)
            elif need is Need.NONE:
                self._remove(one)
        newest = {(one.repository, one.rank): one for one in spare}.values()
        for one in spare:
            if one not in newest or kept.size(self._state) > self._budget:
                self._remove(one)

    def _look(self, one: Kept) -> Need:
        home = self._state.read(HOME, one.op)
        return self._need(Home.from_dict(home)) if home is not None else Need.NONE

    def _remove(self, one: Kept) -> None:
        kept.remove(self._state, one)
        with self._lock:
            self._begun.pop(one, None)
        if not self.holds(one.op):
            self._state.remove(HOME, one.op)
        log.info("removed from this node", extra={"operation": one.op, "rank": one.rank})

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
