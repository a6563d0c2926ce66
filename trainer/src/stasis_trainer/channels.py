"""Names of channels: what two or more ranks take part in, each counting its own part. Equal in all of them."""

from __future__ import annotations

from collections.abc import Iterable

INIT = "init"
NEW = "new"
Counts = dict[str, int]


def group(name: str, generation: int = 1) -> str:
    """Names start over when the world is destroyed and made again: `generation` tells the worlds apart."""
    return f"group {name}" if generation == 1 else f"group {name} of world {generation}"


def pair(of: str, source: int, destination: int, tag: int) -> str:
    return f"{of}, rank {source} to rank {destination}, tag {tag}"


def creation(ranks: Iterable[int] | None = None) -> str:
    """Of all the world's ranks, or of these alone where they synchronize among themselves."""
    return NEW if ranks is None else f"{NEW} {','.join(map(str, ranks))}"


def describe(channel: str, number: int) -> str:
    if channel == INIT:
        return f"init_process_group number {number}"
    if channel.split(" ")[0] == NEW:
        return f"new_group number {number}" + (f" of ranks {channel[len(NEW) + 1 :]}" if channel != NEW else "")
    return f"operation {number} of {channel}"
