"""Who leads: a Lease, as client-go's leader election has it, and the epochs that a leader's coordinators take."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from datetime import UTC, datetime
from typing import Any

from lightkube import AsyncClient

from stasis.errors import NotFound, StasisError
from stasis.kube.client import Conflict, Leases, meta, translated

log = logging.getLogger(__name__)

DURATION = 15.0  # seconds for which nobody else takes a lease that is not renewed
RENEW = 3.0
GIVE_UP = 10.0  # a leader that could not renew for so long leads no more: before another one may begin
EPOCHS = 32  # bits of an epoch that count coordinators


class Lease:
    """`identity` must never be used again: a new leader, also a restarted one, is a transition."""

    def __init__(
        self,
        client: AsyncClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration: float = DURATION,
        renew: float = RENEW,
        give_up: float = GIVE_UP,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration
        self._renew = renew
        self._give_up = give_up
        self._seen: tuple[str, float] = ("", 0.0)  # the last renewal by another, and when it was first seen here
        self._counter = itertools.count(1)
        self._transitions = 0

    def next_epoch(self) -> int:
        """Of the next coordinator: higher than that of any before, by whatever leader. Any thread may ask."""
        return self._transitions << EPOCHS | next(self._counter)

    async def acquire(self) -> None:
        """Wait until this process leads."""
        while not await self._take():
            await asyncio.sleep(self._renew)
        log.info("leads, as %s", self._identity)

    async def hold(self) -> None:
        """Renew until it is lost."""
        renewed = time.monotonic()
        while time.monotonic() - renewed < self._give_up:
            await asyncio.sleep(self._renew)
            began = time.monotonic()
            try:
                async with asyncio.timeout(max(0.1, renewed + self._give_up - began)):
                    if not await self._take(renewing=True):
                        break
            except (StasisError, TimeoutError) as trouble:
                log.warning("the lease is not renewed: %s", trouble or "no answer")
            else:
                renewed = began
        log.warning("leads no more")

    async def release(self) -> None:
        """Let another one lead at once."""
        try:
            with translated("lease"):
                lease = await self._client.get(Leases, self._name, namespace=self._namespace)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._client.replace(lease)
        except StasisError as trouble:
            log.info("the lease runs out by itself: %s", trouble)

    async def _take(self, *, renewing: bool = False) -> bool:
        try:
            with translated("lease"):
                return await self._try(renewing)
        except Conflict:
            return False if not renewing else await self._try(renewing)
        except StasisError as trouble:
            if renewing:
                raise
            log.warning("no lease: %s", trouble)
            return False

    async def _try(self, renewing: bool) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        try:
            with translated("lease"):
                lease = await self._client.get(Leases, self._name, namespace=self._namespace)
        except NotFound:
            about = {"name": self._name, "namespace": self._namespace}
            lease = Leases.from_dict({"metadata": about, "spec": {}})
        spec: dict[str, Any] = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if holder != self._identity:
            if renewing or (holder and not self._expired(lease)):
                return False
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = now
            spec["holderIdentity"] = self._identity
        spec["renewTime"] = now
        spec["leaseDurationSeconds"] = max(1, round(self._duration))
        if meta(lease).get("resourceVersion"):
            lease = await self._client.replace(lease)
        else:
            lease = await self._client.create(lease)
        self._transitions = int(lease["spec"]["leaseTransitions"])
        return True

    def _expired(self, lease: Any) -> bool:
        """By this host's own clock: how long the lease has not changed since it was first seen so."""
        version = str(meta(lease)["resourceVersion"])
        if self._seen[0] != version:
            self._seen = (version, time.monotonic())
        return time.monotonic() - self._seen[1] >= self._duration
