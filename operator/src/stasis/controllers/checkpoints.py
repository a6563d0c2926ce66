"""TrainJobCheckpoints: ours, and those that users make."""

from __future__ import annotations

from typing import Any

import kopf

from stasis.api import names
from stasis.api.v1alpha1.trainjobcheckpoint import TrainJobCheckpoint
from stasis.controllers.seen import Seen


def watch(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.on.event(names.GROUP, names.VERSION, TrainJobCheckpoint.PLURAL, registry=registry)
    async def told(event: kopf.RawEvent, **_: Any) -> None:
        seen.checkpoint(event["object"], event["type"] == "DELETED")
