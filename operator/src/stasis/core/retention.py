"""Which checkpoints are no longer kept. The one that a job's state is in always is, and so is the newest one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from stasis.core.view import Checkpoint, Retention


@dataclass(frozen=True, slots=True)
class Verdicts:
    """`expired`: name -> why; `again`: when the next one may be, in seconds of the wall clock."""

    expired: dict[str, str]
    again: float | None = None


def of_job(checkpoints: Sequence[Checkpoint], kept: Collection[str], retention: Retention, now: float) -> Verdicts:
    """Those of one job that is there, oldest first. `kept`: what something depends on."""
    settled = [checkpoint for checkpoint in checkpoints if checkpoint.settled]
    complete = [checkpoint for checkpoint in settled if not checkpoint.failed]
    failed = [checkpoint for checkpoint in settled if checkpoint.failed]
    expired = {checkpoint.name: "a later one failed too" for checkpoint in failed[:-1]}
    for old in complete[: -retention.keep]:
        expired[old.name] = f"there are {retention.keep} newer ones"
    dues = []
    for checkpoint in [*complete[:-1], *failed] if retention.ttl is not None else ():
        assert retention.ttl is not None
        due = checkpoint.completed_at + retention.ttl
        if due <= now:
            expired.setdefault(checkpoint.name, f"it is older than {retention.ttl:.0f} s")
        else:
            dues.append(due)
    for name in kept:
        expired.pop(name, None)
    return Verdicts(expired, min(dues, default=None))


def of_gone_job(checkpoints: Iterable[Checkpoint], retention: Retention, now: float) -> Verdicts:
    """Those of a job that was deleted; `orphaned_at` says when that was seen."""
    expired, dues = {}, []
    for checkpoint in checkpoints:
        if not checkpoint.settled or not checkpoint.orphaned_at:
            continue
        due = checkpoint.orphaned_at + (0.0 if retention.delete_with_job else retention.ttl_after_delete)
        if due <= now:
            expired[checkpoint.name] = "its TrainJob is gone"
        else:
            dues.append(due)
    return Verdicts(expired, min(dues, default=None))


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint takes of its namespace's room, in bytes."""

    name: str
    completed_at: float
    size: int
    kept: bool  # something depends on it


def over_quota(stored: Iterable[Stored], limit: int) -> tuple[list[str], bool]:
    """The oldest ones that are to go so that all the others take no more than `limit` bytes, and whether they then
    do."""
    left = sorted(stored, key=lambda one: one.completed_at)
    total, gone = sum(one.size for one in left), []
    for one in left:
        if total <= limit:
            break
        if one.size and not one.kept:
            total -= one.size
            gone.append(one.name)
    return gone, total <= limit
