"""CheckpointPolicies: how checkpoints are to be made."""

from __future__ import annotations

from typing import Any

import kopf

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicy
from stasis.controllers.seen import Seen


def watch(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.on.event(names.GROUP, names.VERSION, CheckpointPolicy.PLURAL, registry=registry)
    async def told(event: kopf.RawEvent, **_: Any) -> None:
        seen.policy(event["object"], event["type"] == "DELETED")
