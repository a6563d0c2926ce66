"""What of the store is to go: checkpoints that their tag no longer points to, and the ranks of aborted ones.

Whatever the store says to it, the gang goes on: what could not be removed is said in the log.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from stasis.agent import stored
from stasis.core.records import Verdict, decision_key
from stasis.errors import Corrupt, NotFound, StoreError
from stasis.local.operation import LocalAgent
from stasis.store.checkpoint import Listed, list_checkpoints, remove
from stasis.store.media import UID
from stasis.store.repository import Repository

log = logging.getLogger(__name__)


def tagged(repository: Repository, tag: str) -> Listed | None:
    """The checkpoint that the tag points to now; None where there is none that can be read."""
    try:
        manifest = repository.get_manifest(tag)
    except (NotFound, Corrupt):
        return None
    if not manifest.is_checkpoint:
        return None
    return Listed(tag, manifest.descriptor.digest, manifest.annotations.get(UID, ""), len(manifest.children), {})


def remove_replaced(agent: LocalAgent, repository: Repository, before: Listed) -> None:
    """Remove a checkpoint that its tag no longer points to, unless another tag does."""
    try:
        if any(listed.digest == before.digest for listed in list_checkpoints(repository.reference, repository)):
            return
        remove(replace(repository.reference, digest=before.digest), repository)
    except StoreError as trouble:
        log.warning("the replaced checkpoint %s stays: %s", before.digest, trouble)
        return
    agent.records.forget(before.uid)


def forget_aborted(agent: LocalAgent) -> None:
    """Remove the rank manifests that were stored for checkpoints which were then aborted, also by an agent before."""
    under_way = {spec.op for spec in agent.unfinished()}

    def committed(op: str) -> bool | None:
        decision = agent.records.read(decision_key(op))
        return None if op in under_way else decision is not None and decision.verdict is Verdict.COMMIT

    stored.settle(agent.state, committed)
