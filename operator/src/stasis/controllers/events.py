"""Events on the TrainJob: what happens to it and why, in words for its user."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from lightkube import AsyncClient

from stasis.api import names
from stasis.controllers.status import now
from stasis.errors import StasisError
from stasis.kube.client import Conflict, Events, meta, translated

log = logging.getLogger(__name__)

MAX_NOTE = 1000
MAX_NAME = 253


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
        try:
            await self.write(job, f".{digest}", reason, message, warning=warning)
        except StasisError as error:
            log.warning("an event was not written: %s", error)

    async def write(
        self,
        job: Any,
        suffix: str,
        reason: str,
        message: str,
        *,
        warning: bool,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """The event whose name ends so, unless it is there. Raises Unavailable or Denied."""
        about, at = meta(job), now()
        metadata = {
            "name": about["name"][: MAX_NAME - len(suffix)] + suffix,
            "namespace": about["namespace"],
            "annotations": dict(annotations or {}),
        }
        event = Events.from_dict(
            {
                "metadata": metadata,
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
        with contextlib.suppress(Conflict), translated(f"event {metadata['name']}"):
            await self._client.create(event)
