"""P1..P13: what is compared with what, and the targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Goal:
    """`ours` and `theirs` name samples. What is compared is their ratio or, with `difference`, `ours` less the median
    of `theirs`, at the `quantile` of its runs."""

    name: str
    text: str
    ours: str
    theirs: str
    target: float
    difference: bool = False
    quantile: float = 0.95


GOALS = (
    Goal(
        "P1", "freeze until durable on the local disk / criu dump to disk and sync", "local.durable", "disk.dump", 0.7
    ),
    Goal("P2", "freeze until thawed, goes on / criu dump to tmpfs, goes on", "continue.frozen", "tmpfs.dump", 0.6),
    Goal("P3", "freeze until durable in the registry / dump + tar.zst + push", "registry.durable", "chain.down", 0.45),
    Goal("P4", "freeze until thawed, registry at 250 MB/s / at full speed", "throttled.frozen", "continue.frozen", 1.3),
    Goal("P5", "peak memory of a spilling agent, large / quarter of it", "spill.large", "spill.small", 1.3),
    Goal("P6", "freeze until the last page is taken, held / criu dump to tmpfs", "local.captured", "tmpfs.dump", 0.4),
    Goal("P7", "bytes stored, dense / tar.zst", "registry.stored", "chain.stored", 0.92),
    Goal("P8", "new bytes, second checkpoint of a fine-tune / first", "second.stored", "first.stored", 0.13),
    Goal("P9", "freeze until durable, second checkpoint / first", "second.durable", "first.durable", 0.3),
    Goal("P10", "restore from warm local packs / criu restore", "local.restored", "disk.restored", 1.5),
    Goal("P11", "restore from the registry / pull + unpack + criu restore", "registry.restored", "chain.up", 0.5),
    Goal("P12", "freeze until all frozen and locked, 4 ranks / 1 rank", "four.locked", "one.locked", 1.5),
    Goal("P13", "p95 of the gap after a checkpoint less the usual gap, ms", "gap.worse", "gap.usual", 50.0, True),
)
NAMES = tuple(goal.name for goal in GOALS)


def judge(goal: Goal, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The ratio of the medians, and the lowest and highest of the single runs; of a difference its quantile, and the
    lowest and highest."""
    ours, theirs = values[goal.ours], values[goal.theirs]
    usual = median(theirs)
    if goal.difference:
        found = sorted(value - usual for value in ours)
        result = quantile(found, goal.quantile)
    else:
        found = sorted(a / b for a, b in zip(ours, theirs, strict=False))
        result = median(ours) / usual
    return {
        "median": round(result, 4),
        "spread": [round(found[0], 4), round(found[-1], 4)],
        "target": goal.target,
        "reached": result <= goal.target,
        "runs": len(found),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def worst(by_size: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Of several sizes the one with the worst figure; all of them are kept in `sizes`."""
    name = max(by_size, key=lambda size: by_size[size]["median"])
    return {**by_size[name], "size": name, "sizes": dict(by_size)}
