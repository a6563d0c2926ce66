"""TrainJobs: which are to be suspended, and which no longer."""

from __future__ import annotations

from typing import Any

import kopf

from stasis.controllers.seen import Seen


def watch(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.on.event("trainer.kubeflow.org", "v1alpha1", "trainjobs", registry=registry)
    async def told(event: kopf.RawEvent, **_: Any) -> None:
        seen.trainjob(event["object"], event["type"] == "DELETED")
