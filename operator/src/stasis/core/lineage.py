"""From which checkpoint the training that runs now has come, and whether it has to go back to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stasis.core.plan import Outcome
from stasis.core.view import Checkpoint, Pod, Use


def unusable(checkpoint: Checkpoint) -> str:
    """Why no job can be resumed from it; empty where one can."""
    operation = checkpoint.operation
    if checkpoint.deleting or checkpoint.lost:
        return "is deleted, or its bytes are gone"
    if checkpoint.failed:
        return f"failed: {checkpoint.failed.message}"
    if operation is None or not operation.concluded or operation.outcome not in (Outcome.RELEASED, Outcome.CONTINUED):
        return "is not complete"
    return ""


def last(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The last one that the present training has gone through: taken beside it, or what it was resumed from. None
    where it has begun since."""
    events: list[tuple[int, Checkpoint | None]] = []
    for checkpoint in checkpoints:
        restored = checkpoint.restore.serial if checkpoint.restore else checkpoint.serial
        if checkpoint.use is Use.RESTORED:
            events.append((restored, checkpoint))
        elif checkpoint.use is Use.FRESH:
            events.append((restored, None))
        elif checkpoint.lost:
            continue
        elif checkpoint.operation is not None and checkpoint.operation.outcome is Outcome.CONTINUED:
            events.append((checkpoint.serial, checkpoint))
    return max(events, key=lambda event: event[0], default=(0, None))[1]


def to_go_back_to(
    checkpoints: Sequence[Checkpoint], pods: Sequence[Pod], ranks: Collection[int]
) -> tuple[Checkpoint, list[int]] | None:
    """The last committed checkpoint, where some of the pods that went through it still train, and the ranks that are
    lost.

    A trainer that has failed, or has begun anew, is dealt with as without Stasis: it may have checkpoints of its own,
    and newer ones. Not so where a rank went with its node: the others fail for that.
    """
    found = last(checkpoints)
    if found is None or unusable(found):
        return None
    went = found.restore if found.use is Use.RESTORED else found.operation
    assert went is not None
    members = set(went.pods.values())
    own = [pod for pod in pods if pod.uid in members]
    with_its_node = any(pod.lost for pod in own)
    if not with_its_node:
        if any(pod.failed and not pod.terminating for pod in own):
            return None
        if any(pod.running and (pod.told or pod.incarnation is None) for pod in pods if pod.uid not in members):
            return None
    alive = {pod.rank for pod in own if pod.running and not pod.terminating}
    done = {pod.rank for pod in own if pod.succeeded}
    lost = sorted(set(ranks) - alive - done)
    return (found, lost) if lost and (alive or with_its_node) else None
