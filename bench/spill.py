"""The memory of an agent whose node has none to copy a dump into, so that it goes through an unlinked file: P5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from bench.dense import Places
from bench.measure import Samples, peak_memory
from bench.registry import forget
from bench.subject import GIB, Subject
from stasis.agent.checkpoint import CheckpointRank
from stasis.agent.node import Node
from stasis.agent.reserve import Ledger
from stasis.agent.room import node_room
from stasis.agent.storing import MEMORY
from stasis.core.capacity import Amounts
from stasis.core.steps import Step

RUNS = 3  # memory hardly differs from run to run
LARGER = 4
FROZEN = (Step.FREEZE, Step.DRAIN, Step.LOCK_NETWORK, Step.CAPTURE)


def spill(size: float, runs: int, places: Places, samples: Samples, tell: Callable[[str], None]) -> None:
    """Checkpoints of `size` GiB and of four times as much, each by an agent of its own."""
    for name, gib in (("small", size), ("large", LARGER * size)):
        with Subject("quantized", int(gib * GIB), places.folder / f"spill-{name}") as subject:
            for run in range(min(runs, RUNS)):
                tell(f"spilling agent, {gib:g} GiB, run {run}")
                samples.add(f"spill.{name}", _agent(subject, places))
                forget(places.folder)
            subject.check()


def _agent(subject: Subject, places: Places) -> int:
    """Peak bytes of an agent that takes one checkpoint."""
    job = {
        "container_id": subject.container.id,
        "rank": 0,
        "world_size": 1,
        "repository": f"{places.registry.host}/stasis/spilled",
        "addresses": {"0": [subject.gang.places[0].address]},
        "releases": False,
        "uid": str(uuid.uuid4()),
    }
    command = [sys.executable, "-m", "bench.spill", str(places.folder), json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return int(done.stdout)


def _checkpoint(folder: Path, job: dict[str, object]) -> None:
    node = Node(folder)

    def room(folder: Path) -> Amounts:
        found = node_room(folder)
        return Amounts(MEMORY, found.disk, found.descriptors, found.pipe_pages)

    node.ledger = Ledger(folder / "reservations", room)
    rank = CheckpointRank(node)
    rank.run(Step.PREPARE, job)
    try:
        for step in FROZEN:
            rank.run(step, {})
    finally:
        rank.run(Step.UNLOCK_NETWORK, {})
        rank.run(Step.THAW, {})
    rank.run(Step.STORE, {})
    rank.run(Step.CONTINUE, {})
    print(peak_memory())


if __name__ == "__main__":
    _checkpoint(Path(sys.argv[1]), json.loads(sys.argv[2]))
