"""`stasis try`: will this program survive? It is run in containers, suspended, resumed, and what was found is told."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from stasis import presentation as show
from stasis.agent import provision
from stasis.core.steps import Step
from stasis.errors import Unsupported, UsageError
from stasis.local.gang import GangSpec, LocalGang
from stasis.local.operation import Report
from stasis.local.operator import LocalOperator

ENDS = 10.0  # seconds for released containers to end


@dataclass(frozen=True)
class Attempt:
    """What the user asked for. `where`: a reference to keep the checkpoint in, "" to throw it away."""

    command: Sequence[str]
    ranks: int
    cycles: int
    after: float
    translate: bool
    where: str
    rootfs: Path


def attempt(wanted: Attempt) -> int:
    """Run the program through its suspensions; its output goes to standard output. Returns the program's status.

    Raises Refused and others where the program could not be carried; it is ended then.
    """
    if os.geteuid():
        raise Unsupported("`stasis try` starts containers and freezes them, which needs root", remedy="run it as root")
    if wanted.ranks < 1 or wanted.cycles < 0:
        raise UsageError("--ranks is at least 1, --cycles at least 0")
    folder = Path(tempfile.mkdtemp(prefix="stasis-try-"))
    try:
        spec = GangSpec(
            wanted.command,
            wanted.ranks,
            wanted.rootfs,
            provision.init(),
            env=_environment(),
            options={"cwd": os.getcwd() if wanted.rootfs == Path("/") else "/"},
        )
        several = wanted.ranks > 1
        with LocalGang(f"try{os.getpid()}", spec, folder / "gang", lambda *line: _echo(several, *line)) as gang:
            return _cycles(gang, wanted, wanted.where or f"{folder}/checkpoints:try")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """The user's, less what would lead out of the container."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("STASIS_", "DBUS_", "XDG_RUNTIME"))
    }


def _echo(several: bool, rank: int, line: str) -> None:
    if line.startswith("stasis-init: waiting"):
        return  # ours, not the program's
    print(f"[{rank}] {line}" if several else line, flush=True)


def _cycles(gang: LocalGang, wanted: Attempt, where: str) -> int:
    operator = LocalOperator(gang, where)
    try:
        rows = []
        for cycle in range(wanted.cycles):
            if gang.wait_for(lambda: any(status is not None for status in gang.statuses().values()), wanted.after):
                show.console.print(f"the program ended before suspension {cycle + 1}; use a smaller --after")
                break
            down = operator.suspend()
            gang.wait(ENDS)
            started = time.monotonic()
            up = operator.resume(new_addresses=wanted.translate)
            rows.append(_row(cycle, down, up, time.monotonic() - started))
        while None in (statuses := gang.statuses()).values():
            gang.wait(60.0)
        if rows:
            show.console.print(_table(rows))
        return _verdict(statuses, len(rows), wanted.where)
    finally:
        operator.close()


def _verdict(statuses: dict[int, int | None], cycles: int, where: str) -> int:
    worst = max(status or 0 for status in statuses.values())
    kept = f"; the last checkpoint is {where}" if where else ""
    if worst == 0:
        show.console.print(f"[bold green]survived[/] {cycles} suspensions, exit status 0{kept}")
    else:
        show.console.print(f"[bold]exit status {worst}[/] after {cycles} suspensions{kept}")
    return worst


def _row(cycle: int, down: Report, up: Report, seconds: float) -> list[str]:
    stats = [result["stats"] for result in down.results[Step.STORE].values()]
    raw, duplicate, stored = (sum(s[name] for s in stats) for name in ("raw", "duplicate", "stored"))
    at = down.seconds
    placed = up.results[Step.PLACE].values()
    notes = [str(note) for result in placed for key in ("machine", "volumes") for note in result.get(key, ())]
    return [
        str(cycle + 1),
        show.duration(at[Step.CAPTURE] - at[Step.SAVE_DEVICES]),
        show.size(raw),
        show.share(duplicate, raw),
        show.size(stored),
        show.duration(seconds),
        "; ".join(notes) or "-",
    ]


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for name in ("suspension", "frozen, until captured", "raw", "duplicate", "stored", "resumed in", "noticed"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
