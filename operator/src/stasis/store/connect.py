"""Opens the repository that a reference names."""

from __future__ import annotations

from pathlib import Path

from stasis.store.layout import LayoutRepository
from stasis.store.reference import Reference
from stasis.store.repository import Repository


def open_repository(where: str | Path | Reference, *, budget_bytes: int | None = None) -> Repository:
    reference = Reference(path=where.absolute()) if isinstance(where, Path) else Reference.parse(where)
    assert reference.path is not None
    return LayoutRepository(reference.path, budget_bytes=budget_bytes)
