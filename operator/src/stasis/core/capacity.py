"""How a checkpoint's pages are taken, given what the node has free: chosen before the freeze, or refused in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from stasis.errors import ResourceShort

MIB = 1 << 20
PAGES_OF_A_PIPE = 256  # of 4 KiB; a pipe of 1 MiB needs no privilege


class Mode(StrEnum):
    HOLD = "hold"  # references to the frozen tree's pages, in pipes: no memory, one descriptor for each MiB
    COPY = "copy"  # into memory that was faulted in beforehand
    SPILL = "spill"  # into an unlinked file


@dataclass(frozen=True)
class Amounts:
    """Bytes of memory and disk, file descriptors of one agent's process, pages of pipes of its user."""

    memory: int = 0
    disk: int = 0
    descriptors: int = 0
    pipe_pages: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(*(max(0, getattr(self, one.name) - getattr(other, one.name)) for one in fields(self)))

    def fits(self, room: Amounts) -> bool:
        return all(getattr(self, one.name) <= getattr(room, one.name) for one in fields(self))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Amounts:
        return cls(**{one.name: int(data.get(one.name, 0)) for one in fields(cls)})


@dataclass(frozen=True)
class Plan:
    mode: Mode
    amounts: Amounts


def plan(size: int, room: Amounts, *, releases: bool, kept: Amounts | None = None) -> Plan:
    """How to capture a dump of about `size` bytes.

    `releases`: the tree will be killed, so that its pages may be held by reference. `kept`: what the checkpoint takes
    besides, whatever the mode (packs in a local folder, working memory). `room`: what is there and not reserved.
    Raises ResourceShort.
    """
    pipes = -(-size // MIB)
    ways = [
        *([(Mode.HOLD, Amounts(descriptors=pipes, pipe_pages=pipes * PAGES_OF_A_PIPE))] if releases else []),
        (Mode.COPY, Amounts(memory=size)),
        (Mode.SPILL, Amounts(disk=size)),
    ]
    for mode, amounts in ways:
        wanted = amounts + (kept or Amounts())
        if wanted.fits(room):
            return Plan(mode, wanted)
    raise ResourceShort(
        f"{_mib(size)} to capture"
        + (f" and {_mib(kept.disk)} of packs" if kept and kept.disk else "")
        + f" find no room: {_mib(room.memory)} of memory and {_mib(room.disk)} of disk are free here"
        + (f", and {room.descriptors} descriptors and {room.pipe_pages} pages of pipes" if releases else ""),
        remedy="free memory or disk on this node, or raise the agent's memory limit; other gangs' checkpoints that are "
        "under way give back what they have reserved",
    )


@dataclass(frozen=True)
class ContainerRoom:
    """What a new container gives a tree: None is no limit. `huge_pages`: size of a page -> free ones; `available`:
    memory of the node, in bytes."""

    memory: int | None
    threads: int | None
    huge_pages: Mapping[int, int]
    available: int | None = None


def require_container(room: ContainerRoom, *, memory: int, threads: int, huge_pages: Mapping[int, int]) -> None:
    """ResourceShort, with both values of everything that is too small for the tree that is to be restored."""
    short: list[str] = []
    if room.memory is not None and memory > room.memory:
        short.append(f"its memory limit leaves {_mib(room.memory)}, the checkpoint holds {_mib(memory)}")
    if room.available is not None and memory > room.available:
        short.append(f"the node has {_mib(room.available)} of memory to give, the checkpoint holds {_mib(memory)}")
    if room.threads is not None and threads > room.threads:
        short.append(f"its limit of pids leaves {room.threads}, the checkpoint holds {threads} threads")
    for size, count in sorted(huge_pages.items()):
        if count > room.huge_pages.get(size, 0):
            have = room.huge_pages.get(size, 0)
            short.append(f"{have} huge pages of {_mib(size)} are free, the checkpoint holds {count}")
    if short:
        raise ResourceShort(
            f"the new container is too small: {_joined(short)}",
            remedy="give it at least the resources that the old one had, on a node that has them",
        )


def _joined(parts: Iterable[str]) -> str:
    return "; ".join(parts)


def _mib(size: int) -> str:
    return f"{-(-size // MIB)} MiB"
