"""How things look on a terminal: sizes, durations, tables, progress. Nothing is decided here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

console = Console(stderr=True, highlight=False)


def output() -> Console:
    """For what a command was asked for; where that is no terminal, lines are as long as they must be."""
    stdout = Console(highlight=False)
    return stdout if stdout.is_terminal else Console(highlight=False, width=240)


def size(count: float) -> str:
    """Bytes, as people read them: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """0.12 s, or 95 ms below a tenth of a second."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def rows(found: Sequence[Mapping[str, Any]], columns: Sequence[str], form: str) -> None:
    """A list as a table of some columns, or whole as JSON."""
    if form == "json":
        print(json.dumps(list(found), indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.upper(), overflow="fold")
    for row in found:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    output().print(table)


def checkpoint(found: Mapping[str, Any]) -> None:
    """One checkpoint, for `stasis inspect`."""
    out = output()
    out.print(f"[bold]{found['ref']}[/]  {found['digest']}")
    command = " ".join(found.get("command", ()))
    out.print(f"uid {found['uid']}" + (f", command: {command}" if command else ""), soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("rank", "host", "address", "raw", "zero", "duplicate", "stored", "chunks", "packs", "frozen"):
        table.add_column(name.upper(), justify="left" if name in ("host", "address") else "right")
    for rank in found["ranks"]:
        stats, timings = rank["stats"], rank.get("timings") or {}
        frozen = sum(timings.get(step, 0.0) for step in ("freeze", "drain", "lock-network", "capture"))
        table.add_row(
            str(rank["rank"]),
            str(rank["hostname"]),
            ", ".join((rank.get("addresses") or {}).get(str(rank["rank"]), ())),
            size(stats["raw"]),
            share(stats["zero"], stats["raw"]),
            share(stats["duplicate"], stats["raw"]),
            size(stats["stored"]),
            str(stats["chunks"]),
            str(stats["packs"]),
            duration(frozen),
        )
    out.print(table)


@contextlib.contextmanager
def bytes_progress(title: str) -> Iterator[Callable[[int], None]]:
    """A bar of bytes done, on a terminal only; the context gives what to call with each count."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda count: progress.advance(task, count)
