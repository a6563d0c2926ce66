"""Nodes: where their agents are."""

from __future__ import annotations

from typing import Any

import kopf

from stasis.controllers.seen import Seen


def watch(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.on.event("", "v1", "nodes", registry=registry)
    async def told(event: kopf.RawEvent, **_: Any) -> None:
        seen.node(event["object"], event["type"] == "DELETED")
