"""What the controller asks of a container outside of any operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stasis.agent import lookup, scan
from stasis.agent.needs import needs
from stasis.agent.volume import write_word
from stasis.errors import NotFound, UsageError


def check(body: Mapping[str, Any]) -> dict[str, Any]:
    """What of the training in `container_id` cannot be carried, and what a checkpoint takes. Nothing is touched.

    Raises UsageError, or NotFound where no training runs in such a container."""
    container = _container(body)
    try:
        pid1 = lookup.find_pid1(container)
        root = lookup.find_root(pid1)
        findings = [finding.as_dict() for finding in scan.scan(pid1, root)]
        return {"findings": findings, "needs": needs(pid1, root).as_dict()}
    except ProcessLookupError as gone:
        raise NotFound(str(gone)) from None


def word(body: Mapping[str, Any]) -> None:
    """Tell the placeholder in `container_id` to `run` its command. Raises UsageError, or NotFound where there is none.

    One that has heard its word heeds no other."""
    container = _container(body)
    if body.get("word") != "run":
        raise UsageError(f"a placeholder is not told {body.get('word')!r}")
    try:
        write_word(lookup.find_pid1(container), "word", "run")
    except (ProcessLookupError, FileNotFoundError) as gone:
        raise NotFound(str(gone)) from None


def _container(body: Mapping[str, Any]) -> str:
    container = body.get("container_id")
    if not isinstance(container, str) or not container:
        raise UsageError("no container_id")
    return container
