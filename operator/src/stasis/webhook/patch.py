"""JSON patches (RFC 6902) from what an object was to what it shall be."""

from __future__ import annotations

from typing import Any

Json = Any


def diff(before: Json, after: Json, path: str = "") -> list[dict[str, Json]]:
    """The patch that makes `before` into `after`: empty where they are equal. Lists grow at their end, or are replaced
    item by item while their length stays."""
    if isinstance(before, dict) and isinstance(after, dict):
        patch: list[dict[str, Json]] = [
            {"op": "remove", "path": f"{path}/{_escape(key)}"} for key in before if key not in after
        ]
        for key, value in after.items():
            inside = f"{path}/{_escape(key)}"
            patch += diff(before[key], value, inside) if key in before else [_add(inside, value)]
        return patch
    if isinstance(before, list) and isinstance(after, list) and len(before) <= len(after):
        pairs = zip(before, after, strict=False)
        patch = [step for i, (a, b) in enumerate(pairs) for step in diff(a, b, f"{path}/{i}")]
        return patch + [_add(f"{path}/-", item) for item in after[len(before) :]]
    if before == after and type(before) is type(after):  # in JSON 1 is not true
        return []
    return [{"op": "replace", "path": path, "value": after}]


def _add(path: str, value: Json) -> dict[str, Json]:
    return {"op": "add", "path": path, "value": value}


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
