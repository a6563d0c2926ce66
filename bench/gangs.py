"""Gangs of small ranks under network load: P12 (the time until all are frozen and locked), P13 (the gap after it)."""

from __future__ import annotations

import mmap
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.dense import ENDS
from bench.goals import quantile
from bench.measure import Samples
from bench.product import Product, since_freeze
from stasis.agent import provision
from stasis.core.steps import Step
from stasis.errors import StasisError
from stasis.local.gang import GangSpec, LocalGang

LOAD = Path(__file__).parents[1] / "tests/network/load.c"
SPEC = "pba"  # between each two ranks: ping-pong, bulk both ways, lock-step all-to-all (see LOAD)
RANKS = 4
CONNECTIONS = 256  # struct report of LOAD: a head of 8 words, then as many connections of 8 words each
EPOCH, READY, COUNT, STEP_EPOCH, STEP_FIRST = 0, 2, 3, 5, 6
ERROR, CONNECTION_EPOCH, FIRST = 5, 6, 7
PATIENCE = 60.0  # seconds for all connections to come to life again


class LoadedGang:
    """Ranks of the load program. `epoch()` asks each of them when it is first heard of again."""

    def __init__(self, name: str, ranks: int, folder: Path) -> None:
        self._stat = folder / f"{name}.stat"
        self._stat.mkdir(parents=True)
        self._ranks = ranks
        self._started = 0
        self.reports: list[NDArray[np.uint64]] = []
        script = 'exec /load/load ${RANK:-0} /stat/${RANK:-0} 6000 0 $0 $(awk "/bench-/ {print \\$1}" /etc/hosts)'
        spec = GangSpec(
            ["/bin/sh", "-c", script, SPEC],
            ranks,
            provision.rootfs(),
            provision.init(),
            options={"volumes": {"/stat": self._stat}, "readonly": {"/load": folder / "load"}},
        )
        self.gang = LocalGang(f"bench-{name}", spec, folder / name)

    def __enter__(self) -> LoadedGang:
        self.gang.__enter__()
        try:
            self._wait(self._all_there)
        except BaseException:
            self.gang.delete()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.gang.delete()

    def _all_there(self) -> bool:
        files = [self._stat / str(rank) for rank in range(self._ranks)]
        size = 8 * 8 * (1 + CONNECTIONS)
        if not self.reports and all(file.exists() and file.stat().st_size >= size for file in files):
            for file in files:
                with file.open("r+b") as opened:
                    words = np.frombuffer(mmap.mmap(opened.fileno(), size), np.uint64)
                    self.reports.append(words.reshape(1 + CONNECTIONS, 8))
        return bool(self.reports) and all(report[0, READY] for report in self.reports)

    def epoch(self) -> None:
        """From now on counts who is heard of."""
        number = int(self.reports[0][0, EPOCH]) + 1
        self._started = time.clock_gettime_ns(time.CLOCK_REALTIME)
        for report in self.reports:
            report[0, EPOCH] = number

    def gap(self) -> float:
        """Milliseconds from `epoch` until every connection has received data and every rank has ended a step."""
        self._wait(self._all_heard)
        last = max(
            int(value) for report in self.reports for value in (*self._rows(report)[:, FIRST], report[0, STEP_FIRST])
        )
        return (last - self._started) / 1e6

    def _all_heard(self) -> bool:
        for report in self.reports:
            rows = self._rows(report)
            if rows[:, ERROR].any():
                raise StasisError(f"a connection of the load broke: {rows[:, ERROR].tolist()}")
            if (rows[:, CONNECTION_EPOCH] != report[0, EPOCH]).any() or report[0, STEP_EPOCH] != report[0, EPOCH]:
                return False
        return True

    def _rows(self, report: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return report[1 : 1 + int(report[0, COUNT])]

    def _wait(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline or any(s is not None for s in self.gang.statuses().values()):
                raise StasisError(f"the load does not run: {self.gang.lines}")
            time.sleep(0.001)


@contextmanager
def loaded(name: str, ranks: int, folder: Path) -> Iterator[LoadedGang]:
    program = folder / "load" / "load"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["gcc", "-O2", "-static", "-o", program, LOAD], check=True)
    with LoadedGang(name, ranks, folder) as gang:
        yield gang


def locking(folder: Path, runs: int, samples: Samples) -> None:
    """A gang of one and a gang of four, checkpointed in turn."""
    with loaded("one", 1, folder) as one, loaded("four", RANKS, folder) as four:
        for run in range(runs + 1):
            for name, gang in (("one", one), ("four", four)):
                with Product(gang.gang, f"{folder}/{name}.layout:bench") as product:
                    report = product.checkpoint()
                if run:  # the first one warms up
                    samples.add(f"{name}.locked", since_freeze(report, Step.LOCK_NETWORK))


def gaps(folder: Path, runs: int, samples: Samples) -> None:
    """One gang, left alone, then checkpointed while it goes on, then suspended and resumed."""
    found: dict[str, list[float]] = {"gap.usual": [], "gap.continue": [], "gap.restore": []}
    with loaded("gap", RANKS, folder) as gang:

        def on_stage(stage: str) -> None:
            if stage in (Step.UNLOCK_NETWORK, Step.RELEASE_NETWORK):
                gang.epoch()  # of several rounds of locking the last one counts

        for _ in range(runs):
            time.sleep(0.05)
            gang.epoch()
            found["gap.usual"].append(gang.gap())
        for _ in range(runs):
            time.sleep(0.2)
            with Product(gang.gang, f"{folder}/gap.layout:bench", on_stage) as product:
                product.checkpoint()
            found["gap.continue"].append(gang.gap())
            with Product(gang.gang, f"{folder}/gap.layout:bench", on_stage) as product:
                product.suspend()
                gang.gang.wait(ENDS)
                product.resume()
            found["gap.restore"].append(gang.gap())
    found["gap.worse"] = max(found["gap.continue"], found["gap.restore"], key=lambda values: quantile(values, 0.95))
    for name, values in found.items():
        for value in values:
            samples.add(name, value)
