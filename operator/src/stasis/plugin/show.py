"""How the plugin's answers look on a terminal. Nothing is decided here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.api.v1alpha1.trainjobcheckpoint import ConditionType
from stasis.plugin.snapshot import serial
from stasis.plugin.standing import Phase, Rank, Standing, condition
from stasis.presentation import duration, output, share, size

_COLOURS = {
    Phase.RUNNING: "green",
    Phase.COMPLETE: "green",
    Phase.SUSPENDED: "blue",
    Phase.FAILED: "bold red",
    Phase.DELETING: "red",
}


def as_json(found: Any) -> None:
    print(json.dumps(found, indent=1))


def standing(found: Standing) -> Group:
    """For `status`: a headline, the ranks, what the user should know."""
    colour = _COLOURS.get(found.phase, "yellow")
    head = Text.assemble((f"{found.namespace}/{found.name}", "bold"), "  ", (str(found.phase), colour))
    if found.detail:
        head.append(f"  {found.detail}")
    facts = [f"policy {found.policy_in_force or found.policy or 'none'}"]
    if found.checkpoint:
        facts.append(f"checkpoint {found.checkpoint}")
    if found.restores:
        facts.append(f"restored {found.restores} times" if found.restores > 1 else "restored once")
    if found.frozen_seconds:
        facts.append(f"stood still for {duration(float(found.frozen_seconds))}")
    notes = [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(head, Text(", ".join(facts)), *((_ranks(found.ranks),) if found.ranks else ()), *notes)


def _ranks(ranks: Sequence[Rank]) -> Table:
    table = _table("RANK", "POD", "STATE", "NODE", "POD IP", "ADDRESS", "PREPARED", "RESTARTS", "MEMORY", "DONE")
    for rank in ranks:
        done = "" if rank.done_bytes is None else size(rank.done_bytes)
        if rank.done_bytes is not None and rank.memory_bytes:
            done += f" ({share(min(rank.done_bytes, rank.memory_bytes), rank.memory_bytes)})"
        table.add_row(
            str(rank.rank) if rank.rank >= 0 else "-",
            rank.pod,
            rank.state,
            rank.node,
            rank.pod_ip,
            rank.address,
            "yes" if rank.prepared else "no" if rank.unprepared or rank.state != "saved" else "",
            str(rank.restarts),
            "" if rank.memory_bytes is None else size(rank.memory_bytes),
            done,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


@contextlib.contextmanager
def live(console: Console | None = None) -> Iterator[Callable[[Standing], None]]:
    """Shows each standing in the place of the last; where there is no terminal, a line for each change."""
    console = console or Console(stderr=True, highlight=False)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as shown:
            yield lambda found: shown.update(standing(found), refresh=True)
        return
    told = ""

    def line(found: Standing) -> None:
        nonlocal told
        words = f"{found.phase}: {found.detail}" if found.detail else str(found.phase)
        if words != told:
            told = words
            console.print(escape(words), soft_wrap=True)

    yield line


def checkpoint_row(found: TrainJobCheckpoint, now: datetime | None = None) -> dict[str, Any]:
    """One line of `ls`, also its JSON."""
    status = found.status
    return {
        "name": found.metadata.name,
        "job": found.spec.train_job.name,
        "jobUID": found.spec.train_job.uid,
        "serial": serial(found),
        "kind": str(found.spec.kind),
        "state": state(found),
        "ranks": status.world_size if status else None,
        "storedBytes": (status.stored_bytes or 0) if status else 0,
        "frozenSeconds": (status.frozen_seconds or "") if status else "",
        "repository": status.repository if status else "",
        "index": (status.index or "") if status else "",
        "age": _age(found.metadata.creation_timestamp, now or datetime.now(UTC)),
        "created": found.metadata.creation_timestamp,
    }


def state(found: TrainJobCheckpoint) -> str:
    """The conditions in one word."""
    order = (
        (ConditionType.EXPIRED, "expired"),
        (ConditionType.LOST, "lost"),
        (ConditionType.FAILED, "failed"),
        (ConditionType.DURABLE, "durable"),
        (ConditionType.COMPLETE, "on its nodes"),
    )
    return next((word for kind, word in order if found.condition(kind)), "in progress")


def _age(created: str, now: datetime) -> str:
    try:
        seconds = (now - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def checkpoints(found: Sequence[TrainJobCheckpoint], namespace: str) -> None:
    """For `ls`, with what they take together."""
    rows = [checkpoint_row(item) for item in found]
    table = _table("NAME", "JOB", "KIND", "STATE", "RANKS", "STORED", "FROZEN", "AGE")
    for row in rows:
        table.add_row(
            row["name"],
            row["job"],
            row["kind"],
            row["state"],
            str(row["ranks"] or ""),
            size(row["storedBytes"]),
            duration(float(row["frozenSeconds"])) if row["frozenSeconds"] else "",
            row["age"],
        )
    out = output()
    out.print(table)
    total = sum(row["storedBytes"] for row in rows)
    out.print(f"\n{len(rows)} checkpoints in {namespace}, {size(total)} as each stands alone", highlight=False)


def checkpoint(found: TrainJobCheckpoint) -> None:
    """For `inspect`."""
    out, status = output(), found.status
    out.print(f"[bold]{escape(found.metadata.name)}[/]  {state(found)}  uid {found.metadata.uid}")
    job = found.spec.train_job
    out.print(f"of TrainJob {job.name} ({job.uid}), {found.spec.kind}", highlight=False)
    if found.spec.requested_by:
        out.print(f"asked for by {escape(found.spec.requested_by)}")
    if status is None:
        return
    if status.repository:
        out.print(f"in {status.repository}" + (f"@{status.index}" if status.index else ""), soft_wrap=True)
    if status.message:
        out.print(escape(status.message), soft_wrap=True)
    for kind in ConditionType:
        if held := condition(found, kind):
            words = f"  {kind:9} {held.status:7} {held.reason} {held.message}".rstrip()
            out.print(escape(words), soft_wrap=True, highlight=False)
    table = _table("RANK", "POD", "NODE", "ADDRESSES", "MEMORY", "STORED", "UPLOADED", "SECONDS", "MANIFEST")
    for rank in status.ranks:
        steps = " ".join(f"{step}={seconds}" for step, seconds in rank.seconds.items())
        sizes = (rank.memory_bytes, rank.stored_bytes, rank.uploaded_bytes)
        table.add_row(
            str(rank.rank),
            rank.pod,
            rank.node,
            ", ".join(rank.addresses),
            *("" if count is None else size(count) for count in sizes),
            steps,
            rank.manifest or "",
        )
    if status.ranks:
        out.print(table)


def findings(answer: Mapping[str, Any]) -> None:
    """For `check`."""
    out = output()
    for rank in answer.get("ranks", ()):
        where = f"rank {rank['rank']} ({rank.get('pod', '')} on {rank.get('node', '')})"
        if rank.get("error"):
            out.print(f"[bold red]unknown[/] {where}: {escape(rank['error'])}", soft_wrap=True, highlight=False)
        elif not rank.get("findings"):
            out.print(f"[green]ok[/]      {where}", highlight=False)
        for finding in rank.get("findings", ()):
            who = f"process {finding['pid']} ({finding.get('comm', '')}), " if finding.get("pid") else ""
            place = f"{finding['where']}: " if finding.get("where") else ""
            words = escape(f"{where}: {who}{place}{finding['cause']}")
            out.print(f"[bold red]refused[/] {words}", soft_wrap=True, highlight=False)
            out.print(f"        [dim]remedy: {escape(finding['remedy'])}[/]", soft_wrap=True, highlight=False)


def event_lines(events: Sequence[Mapping[str, Any]], last: int = 5) -> list[str]:
    return [f"{event.get('reason')}: {event.get('message')}" for event in events[-last:]]
