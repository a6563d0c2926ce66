"""What this agent has put into stores for checkpoints that came to nothing, to be removed there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from stasis.agent.journal import StateDir
from stasis.errors import StoreError
from stasis.store.checkpoint import forget
from stasis.store.connect import open_repository
from stasis.store.http import HttpOptions
from stasis.store.media import MANIFEST, RANK_ARTIFACT, Descriptor

log = logging.getLogger(__name__)

STORED = "stored"  # kind of the entries that name a rank's manifest
SOON = HttpOptions(connect_timeout=5, read_timeout=30, patience=5)  # a registry that is down is asked again later


def announce(state: StateDir, op: str, rank: int, repository: str, digest: str) -> None:
    """A rank's manifest is about to be stored: it is to be removed should its checkpoint be aborted."""
    state.write(STORED, f"{op}.{rank}", {"op": op, "repository": repository, "digest": digest})


def operations(state: StateDir) -> set[str]:
    """Those of which manifests were announced and not yet settled."""
    return {name.rpartition(".")[0] for name in state.names(STORED)}


def settle(state: StateDir, committed: Callable[[str], bool | None]) -> None:
    """Remove the manifests of the operations that were not committed, None: it is open. What a store does not let go
    is said in the log, and tried again the next time where that may help."""
    for name in state.names(STORED):
        entry = state.read(STORED, name)
        if entry is None or (kept := committed(entry["op"])) is None:
            continue
        if not kept:
            try:
                with open_repository(entry["repository"], http=SOON) as repository:
                    forget(repository, [Descriptor(MANIFEST, entry["digest"], 0, RANK_ARTIFACT)])
            except StoreError as trouble:
                log.warning("the manifest %s of an aborted checkpoint stays: %s", entry["digest"], trouble)
                if trouble.retryable:
                    continue
        state.remove(STORED, name)
