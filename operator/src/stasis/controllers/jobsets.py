"""JobSets of enabled TrainJobs: what runs, and what the gate says."""

from __future__ import annotations

from typing import Any

import kopf

from stasis.api import names
from stasis.controllers.seen import Seen


def watch(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.on.event(
        "jobset.x-k8s.io", "v1alpha2", "jobsets", registry=registry, labels={names.POLICY_LABEL: kopf.PRESENT}
    )
    async def told(event: kopf.RawEvent, **_: Any) -> None:
        seen.jobset(event["object"], event["type"] == "DELETED")
