"""`python -m bench.run`: all goals of the data path, side by side in one run; every restore is checked bit for bit."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import stasis
from bench import gangs, report
from bench.dense import Dense, Places
from bench.finetune import Finetune
from bench.goals import GOALS, NAMES, judge, worst
from bench.measure import Samples
from bench.registry import registry, throttled
from bench.spill import spill
from bench.subject import GIB, Subject
from stasis import presentation as show

RATE = 250e6  # bytes a second of the slow sink
GAP_RUNS = 20
MINUTES = {"dense": 1.1, "dense round": 1.0, "finetune": 0.5, "finetune round": 0.3, "small": 4.0}  # of 1 GiB, of all


@dataclass(frozen=True)
class Wanted:
    goals: frozenset[str]
    sizes: tuple[float, ...]  # GiB
    fixed: float  # GiB, of what does not go by `sizes`
    runs: int
    folder: Path

    def any(self, *names: str) -> bool:
        return not self.goals.isdisjoint(names)

    @property
    def dense(self) -> set[str]:
        """The experiments on dense state, by the beginnings of their samples."""
        by_size = (goal for goal in GOALS if goal.name in self.goals and goal.name not in FIXED)
        return {sample.partition(".")[0] for goal in by_size for sample in (goal.ours, goal.theirs)}

    @property
    def minutes(self) -> float:
        size = sum(self.sizes) if self.dense else 0
        total = MINUTES["dense"] * size + MINUTES["dense round"] * size * (self.runs + 1)
        if self.any("P8", "P9"):
            total += (MINUTES["finetune"] + MINUTES["finetune round"] * (self.runs + 1)) * self.fixed
        return total + MINUTES["small"] * len(self.goals & {"P5", "P12", "P13"}) / 3


FIXED = {"P5", "P8", "P9", "P12", "P13"}


def measure(wanted: Wanted, places: Places, tell: Callable[[str], None]) -> Iterable[tuple[str, Samples]]:
    """Samples by size ("" for what has a fixed one), as soon as they are complete."""
    if wanted.dense:
        for size in wanted.sizes:
            tell(f"dense, {size:g} GiB: training")
            samples = Samples()
            with Subject("dense", int(size * GIB), places.folder / f"dense-{size:g}") as subject:
                dense = Dense(subject, places, samples)
                for run in range(wanted.runs + 1):
                    dense.round(wanted.dense, lambda name, run=run: tell(f"dense, {size:g} GiB, run {run}: {name}"))  # type: ignore[misc]  # noqa: B023
                    if run == 0:
                        samples.clear()  # the first one warms the memory
            yield f"{size:g}", samples
    samples = Samples()
    if wanted.any("P8", "P9"):
        tell(f"quantized fine-tune, {wanted.fixed:g} GiB: filling")
        with Subject("quantized", int(wanted.fixed * GIB), places.folder / "quantized") as subject:
            finetune = Finetune(subject, places, samples)
            for run in range(wanted.runs + 1):
                tell(f"quantized fine-tune, run {run}")
                finetune.round()
                if run == 0:
                    samples.clear()
    if wanted.any("P5"):
        tell("spilling agents")
        spill(wanted.fixed, wanted.runs, places, samples, tell)
    if wanted.any("P12"):
        tell("gangs of one and four ranks")
        gangs.locking(places.folder, wanted.runs, samples)
    if wanted.any("P13"):
        tell("gaps of a gang under load")
        gangs.gaps(places.folder, max(GAP_RUNS, wanted.runs), samples)
    yield "", samples


def run(wanted: Wanted, output: Path, console: Console) -> dict[str, Any]:
    """Measure, and write what was found after each part: what is complete survives whatever comes next."""
    started = time.monotonic()

    def tell(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.0f} s[/]  {text}")

    compileall.compile_dir(Path(stasis.__file__).parent, quiet=1)  # as an installed package is: agents start processes
    results = report.load(output)
    results["machine"] = report.machine()
    by_size: dict[str, dict[str, Any]] = {}
    folder = Path(tempfile.mkdtemp(prefix="stasis-bench-", dir=wanted.folder))
    try:
        with ExitStack() as stack:
            server = stack.enter_context(registry(folder))
            slow = stack.enter_context(throttled(folder, server.port, RATE))
            for size, samples in measure(wanted, Places(folder, server, slow, oras()), tell):
                results["samples"].setdefault(size, {}).update(samples.values)
                if stages := samples.stages():
                    results["stages"].setdefault(size, {}).update(stages)
                for goal in GOALS:
                    if goal.name in wanted.goals and samples.values.keys() >= {goal.ours, goal.theirs}:
                        by_size.setdefault(goal.name, {})[size] = judge(goal, samples.values)
                        found = worst(by_size[goal.name]) if size else by_size[goal.name][size]
                        results["ratios"][goal.name] = {**found, "what": goal.text, "date": results["machine"]["date"]}
                report.save(output, results)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.plot(results, output.with_suffix(".png"))
    return results


def oras() -> Path:
    script = Path(__file__).parents[1] / "tools/oras.sh"
    return Path(subprocess.run([script], check=True, capture_output=True, text=True).stdout.strip())


@click.command(context_settings={"show_default": True})
@click.option("--sizes", default="1", help="GiB of dense state, separated by commas")
@click.option("--fixed", default=1.0, help="GiB of what has one size only (P5: this and four times as much; P8, P9)")
@click.option("--runs", default=5, help="of each experiment, after one that warms the memory")
@click.option("--only", default=",".join(NAMES), help="goals; the other figures of the output file stay")
@click.option(
    "--output", type=Path, default=Path(__file__).parent / "results/latest.json", help="the plot goes beside it"
)
@click.option("--folder", type=Path, default=Path("/var/tmp"), help="on the disk that is measured")
def main(sizes: str, fixed: float, runs: int, only: str, output: Path, folder: Path) -> None:
    """Measure the data path against what people would use."""
    if os.geteuid():
        raise click.UsageError("the benchmark starts containers and freezes them, which needs root")
    goals = frozenset(only.split(","))
    if unknown := goals - set(NAMES):
        raise click.UsageError(f"no goals: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    wanted = Wanted(goals, tuple(float(size) for size in sizes.split(",")), fixed, runs, folder)
    console = Console(stderr=True, highlight=False)
    console.print(f"about {wanted.minutes:.0f} minutes on two quiet cores")
    report.table(run(wanted, output, console), show.output())


if __name__ == "__main__":
    main()
