"""Events on the TrainJob: what happens to it and why, in words for its user."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import httpx2
from lightkube import AsyncClient

from stasis.api import names
from stasis.controllers.status import now
from stasis.kube.client import Events, meta, status_code

log = logging.getLogger(__name__)

MAX_NOTE = 1000


class Teller:
    def __init__(self, client: AsyncClient, instance: str) -> None:
        self._client = client
        self._instance = instance

    async def tell(self, job: Any | None, reason: str, message: str, *, warning: bool = False) -> None:
        """Of a TrainJob that is there. The same event twice is one: it has a name made of what it says and when."""
        about, at = meta(job) if job is not None else {}, now()
        context = {"namespace": about.get("namespace"), "job": about.get("name")} if about else {}
        log.log(logging.WARNING if warning else logging.INFO, "%s: %s", reason, message, extra=context)
        if job is None:
            return
        digest = hashlib.sha256(f"{about['uid']}{reason}{message}{at}".encode()).hexdigest()[:16]
        event = Events.from_dict(
            {
                "metadata": {"name": f"{about['name']}.{digest}", "namespace": about["namespace"]},
                "involvedObject": {
                    "apiVersion": job.get("apiVersion"),
                    "kind": job.get("kind"),
                    "name": about["name"],
                    "namespace": about["namespace"],
                    "uid": about["uid"],
                },
                "reason": reason,
                "message": message[:MAX_NOTE],
                "type": "Warning" if warning else "Normal",
                "firstTimestamp": at,
                "lastTimestamp": at,
                "count": 1,
                "source": {"component": names.GROUP},
                "reportingComponent": names.GROUP,
                "reportingInstance": self._instance,
            }
        )
        try:
            await self._client.create(event)
        except httpx2.HTTPError as error:
            if status_code(error) != 409:
                log.warning("an event was not written: %s", error)
