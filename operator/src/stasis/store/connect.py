"""Opens the repository that a reference names."""

from __future__ import annotations

from pathlib import Path

from stasis.store.credentials import Credentials
from stasis.store.http import HttpOptions
from stasis.store.layout import LayoutRepository
from stasis.store.reference import Reference
from stasis.store.registry import RegistryRepository
from stasis.store.repository import Repository


def open_repository(
    where: str | Path | Reference,
    *,
    budget_bytes: int | None = None,
    credentials: Credentials | None = None,
    plain_http: bool | None = None,
    http: HttpOptions | None = None,
) -> Repository:
    """`budget_bytes` holds for a folder, the others for a registry. Nothing is read or written yet."""
    reference = Reference(path=where.absolute()) if isinstance(where, Path) else Reference.parse(where)
    if reference.path is not None:
        return LayoutRepository(reference.path, budget_bytes=budget_bytes)
    return RegistryRepository(reference, credentials=credentials, plain_http=plain_http, options=http)
