"""What goes over a trainer's socket: one JSON object a line, requests `op`, events `event`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

VERSION = 1


class Phase(str, Enum):
    RUNNING = "running"
    ARMED = "armed"  # an operation begins only if this rank owes one
    COMMITTED = "committed"  # none begins
    TORN = "torn"  # groups are gone, stores are saved
    CLOSED = "closed"  # no socket is left
    REBUILT = "rebuilt"


@dataclass(frozen=True)
class State:
    """Of one process. Counts are of operations begun, by channel; `members` are ranks of the world."""

    rank: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)  # channels of operations begun and not done
    parked: list[str] = field(default_factory=list)
    brief_calls: int = 0  # of stores and groups
    refused: list[str] = field(default_factory=list)  # what this process uses that cannot be torn down and rebuilt

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, message: dict[str, Any]) -> State:
        return cls(**{name: message[name] for name in cls.__dataclass_fields__ if name in message})
