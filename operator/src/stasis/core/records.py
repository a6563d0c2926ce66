"""The records of an operation: each is written once by compare-and-swap, and the first writer wins.

Records and the operation's own description are all that outlives a coordinator: whoever leads next reads them and goes
on. A record never changes; `Records.create` answers with the record that is there afterwards, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stasis.errors import StasisError


class Verdict(StrEnum):
    """What a record says."""

    COMMIT = "commit"  # the checkpoint: every rank's part is complete and durable
    ABORT = "abort"
    RELEASE = "release"  # a committed checkpoint's trees are killed
    CONTINUE = "continue"  # or run on
    RESTORED = "restored"  # an attempt to restore: its ranks may run
    ABANDONED = "abandoned"  # or never will
    ENDED = "ended"  # the operation: nothing of it is left to do


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step failed: an error of `stasis.errors` as data, with where it happened."""

    reason: str  # the error's class
    message: str
    remedy: str = ""
    rank: int | None = None
    step: str = ""
    retryable: bool = True  # False: another attempt of a restore would fail the same way
    detail: Mapping[str, Any] = field(default_factory=dict)  # JSON; findings, digests

    @classmethod
    def of(cls, error: StasisError, *, rank: int | None = None, step: str = "", retryable: bool = True) -> Failure:
        findings = [finding.as_dict() for finding in getattr(error, "findings", ())]
        detail = {"findings": findings} if findings else {}
        return cls(error.reason, error.message, error.remedy, rank, step, retryable, detail)

    def __str__(self) -> str:
        where = f"rank {self.rank}: " if self.rank is not None else ""
        step = f"{self.step}: " if self.step else ""
        remedy = f". Remedy: {self.remedy}" if self.remedy else ""
        return f"{where}{step}{self.message} ({self.reason}){remedy}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "message": self.message,
            "remedy": self.remedy,
            "rank": self.rank,
            "step": self.step,
            "retryable": self.retryable,
            "detail": dict(self.detail),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Failure:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Record:
    """One decision. `epoch` is the writer's, for the reader's understanding: what is recorded holds for every epoch."""

    verdict: Verdict
    op: str
    epoch: int
    attempt: int = 0
    ranks: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()  # ranks that exited with 0 before the checkpoint: a restore expects none for them
    manifests: Mapping[int, str] = field(default_factory=dict)  # Commit: rank -> digest of its manifest
    outcome: str = ""  # Ended: an `Outcome` of plan.py
    failures: tuple[Failure, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": str(self.verdict),
            "op": self.op,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "ranks": list(self.ranks),
            "finished": list(self.finished),
            "manifests": {str(rank): digest for rank, digest in self.manifests.items()},
            "outcome": self.outcome,
            "failures": [failure.to_dict() for failure in self.failures],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        return cls(
            Verdict(data["verdict"]),
            data["op"],
            data["epoch"],
            data["attempt"],
            tuple(data["ranks"]),
            tuple(data["finished"]),
            {int(rank): digest for rank, digest in data["manifests"].items()},
            data["outcome"],
            tuple(Failure.from_dict(failure) for failure in data["failures"]),
        )


def decision_key(op: str) -> str:
    """Commit or Abort of a checkpoint."""
    return f"{op}/decision"


def release_key(op: str) -> str:
    """Release or Continue of a committed checkpoint."""
    return f"{op}/release"


def restored_key(op: str, attempt: int) -> str:
    """Restored or Abandoned of one attempt of a restore."""
    return f"{op}/restored-{attempt}"


def end_key(op: str) -> str:
    """Ended: every rank has done what the decisions ask."""
    return f"{op}/end"
