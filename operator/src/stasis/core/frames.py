"""What goes over the connection between the cluster's controller and a node's agent: JSON objects, both ways.

To the agent: a message for a member, or word that an operation is over. From it: a message for a coordinator, or how
far a rank is with storing. A frame may be lost with its connection: the machines repeat what is not answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stasis.core.messages import Decided, Message, Order, Report, message_from_dict
from stasis.errors import UsageError


@dataclass(frozen=True, slots=True)
class Home:
    """The TrainJobCheckpoint that holds an operation's records."""

    namespace: str
    name: str
    uid: str

    def to_dict(self) -> dict[str, str]:
        return {"namespace": self.namespace, "name": self.name, "uid": self.uid}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Home:
        return cls(str(data["namespace"]), str(data["name"]), str(data["uid"]))


@dataclass(frozen=True, slots=True)
class Command:
    """Controller to agent: `message` is for the member at `to`. `credentials`: of the job's repository, the text of a
    docker config; the agent never writes them down."""

    to: str  # messages.member_address
    message: Order | Decided
    home: Home
    credentials: str = field(default="", repr=False)

    def to_dict(self) -> dict[str, Any]:
        frame = {"to": self.to, "message": self.message.to_dict(), "checkpoint": self.home.to_dict()}
        return frame | {"credentials": self.credentials} if self.credentials else frame


@dataclass(frozen=True, slots=True)
class Forget:
    """Controller to agent: the operation's end is recorded."""

    op: str

    def to_dict(self) -> dict[str, Any]:
        return {"forget": self.op}


@dataclass(frozen=True, slots=True)
class Answer:
    """Agent to controller: `message` is for the coordinator at `to`."""

    to: str  # messages.coordinator_address
    message: Report

    def to_dict(self) -> dict[str, Any]:
        return {"to": self.to, "message": self.message.to_dict()}


@dataclass(frozen=True, slots=True)
class Progress:
    """Agent to controller: bytes of a rank's memory and files that were stored so far."""

    op: str
    rank: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {"progress": {"op": self.op, "rank": self.rank, "bytes": self.bytes}}


Frame = Command | Forget | Answer | Progress


def frame_from_dict(data: Any) -> Frame:
    """The frame of a `to_dict`, also after JSON. Raises UsageError for what is none."""
    try:
        if "forget" in data:
            return Forget(str(data["forget"]))
        if "progress" in data:
            told = data["progress"]
            return Progress(str(told["op"]), int(told["rank"]), int(told["bytes"]))
        message: Message = message_from_dict(data["message"])
        if isinstance(message, Report):
            return Answer(str(data["to"]), message)
        home = Home.from_dict(data["checkpoint"])
        return Command(str(data["to"]), message, home, str(data.get("credentials", "")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"this is no frame of the gang protocol: {type(error).__name__} {error}") from None
