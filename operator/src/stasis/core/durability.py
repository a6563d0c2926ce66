"""Checkpoints of durability Local: from commit until the registry has them, they are on their nodes' disks alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

POLL = 5.0  # seconds from one look at how far the uploads are to the next


class Upload(StrEnum):
    """How far a node is with the upload of a rank's part."""

    UNDER_WAY = "UnderWay"
    DONE = "Done"
    MISSING = "Missing"  # the node does not have it
    BROKEN = "Broken"  # what the node has is not as it was written


class Need(StrEnum):
    """What a node keeps a part for."""

    ALONE = "Alone"  # no registry has it
    SPARE = "Spare"  # the registry has it
    NONE = "None"  # nobody will ask for it


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a rank's part. `upload`: None where the node does not answer, for `silent` seconds by now;
    `message`: what stands against the upload for the moment."""

    node: str
    upload: Upload | None
    message: str = ""
    silent: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """`lost`: no registry will ever have all of it, and why."""

    durable: bool = False
    lost: str = ""
    message: str = ""


def standing(ranks: Mapping[int, Told], patience: float) -> Standing:
    """Of a checkpoint. A node that does not answer for more than `patience` seconds does not count any more, unless
    it has said before that its parts are uploaded (then they are not asked for)."""
    lost, open_, why = [], set(), []
    for rank, told in sorted(ranks.items()):
        match told.upload:
            case Upload.DONE:
                continue
            case Upload.MISSING:
                lost.append(f"rank {rank}: node {told.node} does not have it any more")
            case Upload.BROKEN:
                lost.append(f"rank {rank}, node {told.node}: {told.message}")
            case None if told.silent > patience:
                lost.append(f"rank {rank}: its only copy is on node {told.node}, which is gone or does not answer")
        open_.add(told.node)
        if told.message and (line := f"node {told.node}: {told.message}") not in why:
            why.append(line)
    if not open_:
        return Standing(durable=True)
    return Standing(lost="; ".join(lost), message="; ".join([alone(open_), *why]))


def alone(nodes: set[str]) -> str:
    """For people: where the bytes are."""
    return f"not yet in the registry, only on {'node' if len(nodes) == 1 else 'nodes'} {', '.join(sorted(nodes))}"
