"""What coordinator and members say to each other. Any message may be lost, doubled, late or from a deposed leader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stasis.core.plan import Kind, Timing
from stasis.core.records import Failure, Record


class Standing(StrEnum):
    """Where a rank stands, as it reports it."""

    BUSY = "busy"  # carries out stage `index`
    DONE = "done"  # is through stage `index`; its vote, where that is the stage it votes by
    FAILED = "failed"  # of a restored rank: `index` failed for good
    ABORTED = "aborted"  # has not voted and never will; still undoing
    SETTLED = "settled"  # has nothing left to do in this operation, or this attempt
    STALE = "stale"  # has seen a higher epoch: the sender leads no more


@dataclass(frozen=True, slots=True)
class Order:
    """Coordinator to member: be through stage `index`. Repeated until the answer says so."""

    op: str
    serial: int
    kind: Kind
    attempt: int
    epoch: int
    index: int
    timing: Timing
    args: Mapping[str, Any] = field(default_factory=dict)
    record: Record | None = None  # Restored, with every stage after a restore's vote

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "order",
            "op": self.op,
            "serial": self.serial,
            "kind": str(self.kind),
            "attempt": self.attempt,
            "epoch": self.epoch,
            "index": self.index,
            "timing": self.timing.to_dict(),
            "args": dict(self.args),
            "record": self.record.to_dict() if self.record else None,
        }


@dataclass(frozen=True, slots=True)
class Decided:
    """Coordinator to member: this is recorded (Abort, Release, Continue, Abandoned); act on it."""

    op: str
    serial: int
    kind: Kind
    attempt: int
    epoch: int
    timing: Timing
    record: Record

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "decided",
            "op": self.op,
            "serial": self.serial,
            "kind": str(self.kind),
            "attempt": self.attempt,
            "epoch": self.epoch,
            "timing": self.timing.to_dict(),
            "record": self.record.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Member to coordinator."""

    op: str
    attempt: int
    rank: int
    epoch: int  # the highest that the member has seen
    standing: Standing
    index: int = -1
    result: Mapping[str, Any] = field(default_factory=dict)  # Done: what the stage's step returned
    failure: Failure | None = None
    exited: int | None = None  # the tree's exit status, -1 where it is unknown (the node restarted); None: it lives

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "report",
            "op": self.op,
            "attempt": self.attempt,
            "rank": self.rank,
            "epoch": self.epoch,
            "standing": str(self.standing),
            "index": self.index,
            "result": dict(self.result),
            "failure": self.failure.to_dict() if self.failure else None,
            "exited": self.exited,
        }


Message = Order | Decided | Report


def message_from_dict(data: Mapping[str, Any]) -> Message:
    """The message of a `to_dict`, also after JSON."""
    fields = {key: value for key, value in data.items() if key != "type"}
    if data["type"] == "report":
        failure = Failure.from_dict(data["failure"]) if data["failure"] else None
        return Report(**{**fields, "standing": Standing(data["standing"]), "failure": failure})
    record = Record.from_dict(data["record"]) if data["record"] else None
    fields |= {"kind": Kind(data["kind"]), "timing": Timing.from_dict(data["timing"]), "record": record}
    return Decided(**fields) if data["type"] == "decided" else Order(**fields)


def coordinator_address(op: str, epoch: int) -> str:
    """Each coordinator has an address of its own, so that two at once do not take each other's answers."""
    return f"{op}@{epoch}"


def member_address(op: str, rank: int) -> str:
    """The agent of one rank, in the container that `op` is about: a restore's is another than the checkpoint's."""
    return f"{op}#{rank}"
