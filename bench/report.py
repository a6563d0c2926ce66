"""What was found: latest.json, a table, a plot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.goals import GOALS
from stasis import presentation as show


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    memory = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _first(["git", "describe", "--always", "--dirty"]),
        "kernel": platform.release(),
        "cpu": cpu.partition(":")[2].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "load": os.getloadavg()[0],
        "zstd": _first(["zstd", "--version"]),
        "registry": _first(["docker-registry", "--version"]),
    }


def _first(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip().split("\n")[0]


def load(path: Path) -> dict[str, Any]:
    """Results of before, to which a run of a selection adds its own."""
    empty: dict[str, Any] = {"ratios": {}, "stages": {}, "samples": {}, "machine": {}}
    return json.loads(path.read_text()) if path.exists() else empty


def save(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.rename(path)


def table(results: Mapping[str, Any], console: Console) -> None:
    goals = Table(
        box=None, title="Stasis / what people would use, medians; spread of the single runs", title_justify="left"
    )
    for name in ("", "goal", "size", "found", "spread", "target", ""):
        goals.add_column(name, justify="left" if name in ("", "goal") else "right")
    for goal in GOALS:
        if not (found := results["ratios"].get(goal.name)):
            continue
        for size, one in found.get("sizes", {"": found}).items():
            low, high = one["spread"]
            verdict = "[green]reached[/]" if one["reached"] else "[bold red]not reached[/]"
            row = (f"{one['median']:.3g}", f"{low:.3g} .. {high:.3g}", f"{one['target']:g}", verdict)
            goals.add_row(goal.name, goal.text, f"{size} GiB" if size else "", *row)
    console.print(goals)
    console.print("CPU of the registry is not counted; peak memory is that of the stage's largest process.")
    for size, stages in results["stages"].items():
        costs = Table(title=f"{size} GiB, per stage (medians)", title_justify="left", box=None)
        for name in ("stage", "wall", "CPU", "peak memory", "bytes"):
            costs.add_column(name, justify="left" if name == "stage" else "right")
        for stage, cost in stages.items():
            figures = (show.duration(cost["wall"]), show.duration(cost["cpu"]), show.size(cost["peak"]))
            costs.add_row(stage, *figures, show.size(cost["bytes"]) if cost["bytes"] else "")
        console.print(costs)


def plot(results: Mapping[str, Any], path: Path) -> None:
    """On the left each figure as a share of its target, on the right the way down and up in seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    names = [goal.name for goal in GOALS if goal.name in results["ratios"]][::-1]
    for row, name in enumerate(names):
        found = results["ratios"][name]
        target = found["target"]
        value, low, high = (x / target for x in (found["median"], *found["spread"]))
        left.barh(row, value, color="tab:green" if found["reached"] else "tab:red")
        left.plot([low, high], [row, row], color="black", linewidth=1)
    left.axvline(1, color="black", linestyle="--")
    left.set_yticks(range(len(names)), names)
    left.set_xlabel("figure / target (line: spread of the runs)")
    ways = {
        "down: dump, tar, zstd, push": "chain.down",
        "down: Stasis": "registry.durable",
        "up: pull, unpack, criu restore": "chain.up",
        "up: Stasis": "registry.restored",
    }
    sizes = [size for size, samples in results["samples"].items() if all(name in samples for name in ways.values())]
    for number, (label, name) in enumerate(ways.items()):
        seconds = [sorted(results["samples"][size][name])[len(results["samples"][size][name]) // 2] for size in sizes]
        places = [at + 0.2 * number for at in range(len(sizes))]
        right.bar(places, seconds, 0.2, label=label, color=f"C{number // 2}", alpha=0.5 if number % 2 == 0 else 1)
    if sizes:
        right.set_xticks([at + 0.3 for at in range(len(sizes))], [f"{size} GiB" for size in sizes])
        right.set_ylabel("seconds, to and from the registry")
        right.legend()
    else:
        right.set_axis_off()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
