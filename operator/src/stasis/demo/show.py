"""`stasis demo`: a gang suspended in mid-step and resumed elsewhere, twice, and the proof that it was undisturbed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stasis import presentation as show
from stasis.agent import provision
from stasis.core.steps import Step
from stasis.demo.proof import differences, steps
from stasis.errors import CheckpointFailed, Unsupported
from stasis.local.gang import GangSpec, LocalGang
from stasis.local.operation import Report
from stasis.local.operator import LocalOperator

CYCLES = 2
LIMIT = 300.0  # seconds for any part of the training


def run(count: int, ranks: int) -> int:
    """Train `count` steps with `ranks` ranks, disturbed and undisturbed, and compare. Returns the exit code."""
    if os.geteuid():
        raise Unsupported("the demo starts containers and freezes them, which needs root", remedy="run it as root")
    command = ["python3", "-m", "torch.distributed.run", "/demo/train.py", "--steps", str(count), "--pause", "0.05"]
    spec = GangSpec(
        command,
        ranks,
        provision.rootfs(),
        provision.init(),
        options={"volumes": {"/demo": Path(__file__).parent}},
    )
    folder = Path(tempfile.mkdtemp(prefix="stasis-demo-"))
    try:
        return _Demo(spec, count, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Demo:
    def __init__(self, spec: GangSpec, count: int, folder: Path) -> None:
        self.spec = spec
        self.count = count
        self.folder = folder
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(*columns, TimeElapsedColumn(), console=show.console)
        self.rows: list[dict[str, Any]] = []

    def run(self) -> int:
        with self.progress:
            disturbed = self._disturbed()
            undisturbed = self._undisturbed()
        show.console.print(self._table())
        wrong = differences(disturbed, undisturbed)
        for line in wrong:
            show.console.print(f"[bold red]wrong:[/] {line}")
        if not wrong:
            last = steps(disturbed[0])[-1]
            show.console.print(
                f"[bold green]undisturbed:[/] {self.spec.ranks} ranks x {self.count} steps, each once and in order, by "
                f"the same processes, every loss equal to the undisturbed run's, the last {last.loss}"
            )
        return CheckpointFailed.exit_code if wrong else 0

    def _disturbed(self) -> dict[int, list[str]]:
        bar = self.progress.add_task("training", total=self.count)
        gang = LocalGang("demo", self.spec, self.folder / "gang", lambda rank, line: self._line(bar, rank, line))
        with gang:
            stage = self.progress.add_task("", total=None, visible=False)
            operator = LocalOperator(
                gang,
                f"{self.folder}/checkpoints:demo",
                on_stage=lambda step: self.progress.update(stage, visible=True, description=f"  {step}"),
            )
            for cycle in range(CYCLES):
                self._reach(gang, (cycle + 1) * self.count // (CYCLES + 1))
                down = operator.suspend()
                gang.wait(10)
                started = time.monotonic()
                before = [len(steps(lines)) for lines in gang.lines.values()]
                up = operator.resume(new_addresses=True)
                restored = time.monotonic() - started
                self.progress.update(stage, visible=False)
                gang.wait_for(lambda: all(map(_more, gang.lines.values(), before)), LIMIT)  # noqa: B023
                self._row(down, up, restored, time.monotonic() - started)
            self._finish(gang)
            operator.close()
            return gang.lines

    def _undisturbed(self) -> dict[int, list[str]]:
        bar = self.progress.add_task("the same, undisturbed", total=self.count)
        with LocalGang("demo-u", self.spec, self.folder / "undisturbed", lambda *a: self._line(bar, *a)) as gang:
            self._finish(gang)
            return gang.lines

    def _line(self, bar: Any, rank: int, line: str) -> None:
        if rank == 0 and (found := steps([line])):
            self.progress.update(bar, completed=found[0].number + 1)

    def _reach(self, gang: LocalGang, step: int) -> None:
        if not gang.wait_for_step(step, LIMIT):
            raise CheckpointFailed(f"the training did not reach step {step}: {_last(gang)}")

    def _finish(self, gang: LocalGang) -> None:
        statuses = gang.wait(LIMIT)
        if any(statuses.values()) or None in statuses.values():
            raise CheckpointFailed(f"the training ended with {statuses}: {_last(gang)}")

    def _row(self, down: Report, up: Report, restored: float, first_step: float) -> None:
        stats = [result["stats"] for result in down.results[Step.STORE].values()]
        total = {name: sum(s[name] for s in stats) for name in ("raw", "zero", "duplicate", "stored")}
        at = down.seconds
        self.rows.append(
            {
                "all frozen": show.duration(at[Step.FREEZE] - at[Step.SAVE_DEVICES]),
                "dump": show.duration(at[Step.CAPTURE] - at[Step.LOCK_NETWORK]),
                "frozen, until durable": show.duration(at[Step.STORE] - at[Step.SAVE_DEVICES]),
                "raw": show.size(total["raw"]),
                "zero": show.share(total["zero"], total["raw"]),
                "duplicate": show.share(total["duplicate"], total["raw"]),
                "stored": show.size(total["stored"]),
                "restore": show.duration(restored),
                "first step": show.duration(first_step),
            }
        )

    def _table(self) -> Table:
        table = Table(title=f"{self.spec.ranks} ranks, fresh containers and other addresses each time")
        table.add_column("suspension")
        for cycle in range(len(self.rows)):
            table.add_column(str(cycle + 1), justify="right")
        for name in self.rows[0]:
            table.add_row(name, *(row[name] for row in self.rows))
        return table


def _more(lines: Sequence[str], before: int) -> bool:
    return len(steps(lines)) > before


def _last(gang: LocalGang) -> str:
    return "; ".join(f"rank {rank}: {' | '.join(lines[-3:])}" for rank, lines in gang.lines.items())
