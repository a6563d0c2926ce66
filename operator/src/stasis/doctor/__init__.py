"""`stasis doctor`: what this machine has and lacks, in plain words, and what each lack means.

Nothing is changed: what has to be tried is tried in namespaces that end with the trial. Works without root, and then
says what could not be tried.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stasis.agent import provision
from stasis.doctor import gpus, kernel, machine, programs
from stasis.doctor.check import Check, Status
from stasis.errors import Unsupported

__all__ = ["Check", "Status", "checks", "run", "table"]

STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.LACK: "bold red"}


def checks(*, node: bool = False) -> list[Check]:
    """All of them, in the order in which they are shown. `node`: of a cluster, where the agent starts no containers."""
    folders = {"disk": provision.cache(), "temporary files": Path(tempfile.gettempdir())}
    return [*machine.checks(folders), *kernel.checks(), *gpus.checks(), *programs.checks(node=node)]


def table(found: list[Check]) -> Table:
    """What a lack means stands under it, with its remedy; one remedy of several in a row, once, under the last."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    areas = {check.area: None for check in found}  # in their order
    for area in areas:
        shown.add_row(f"[bold]{area}[/]")
        rows = [check for check in found if check.area == area]
        for check, following in zip(rows, [*rows[1:], None], strict=True):
            text = escape(check.found)
            if check.status is not Status.OK:
                text += f"\n[dim]{escape(check.meaning)}[/]"
                if following is None or (following.status, following.remedy) != (check.status, check.remedy):
                    text += f"\n[dim]remedy: {escape(check.remedy)}[/]"
            shown.add_row(f"  {escape(check.name)}", f"[{STYLES[check.status]}]{check.status}[/]", text)
    return shown


def run(as_json: bool) -> int:
    """Print the checks; 0 if all that is needed is there, else the exit code of `Unsupported`."""
    found = checks()
    lacking = [check.name for check in found if check.status is Status.LACK]
    if as_json:
        print(json.dumps({"ok": not lacking, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        console = Console(emoji=False)
        console.print(table(found))
        warned = sum(check.status is Status.WARN for check in found)
        verdict = f"lacking: {', '.join(lacking)}" if lacking else "all that is needed is there"
        console.print(f"\n{verdict}; {warned} warnings", style="bold red" if lacking else "bold green", highlight=False)
    return Unsupported.exit_code if lacking else 0
