"""What both programs' commands share: how errors end, and the format of what is printed.

Exit codes of `stasis` and `kubectl stasis`: 0 success; 1 an error without a class of its own; 2 wrong usage; 3 refused
before anything was frozen; 4 the machine or cluster lacks something; 5 memory, disk or descriptors too short; 6 a
checkpoint failed, the program ran on; 7 a restore failed, its checkpoint is intact; 8 the store or the API server
cannot be used, or what was named is not there; 9 a checkpoint is corrupt; 10 a case went wrong; 11 the time to wait is
over, and what was asked for goes on. `try` exits with the program's own status where none of these came first.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape

from stasis.errors import StasisError, Unsupported

F = TypeVar("F", bound=Callable[..., Any])


def output_option(function: F) -> F:
    """`-o table|json`."""
    option = click.option(
        "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Format."
    )
    return option(function)


class Group(click.Group):
    """Errors of ours become one line with a remedy, and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # containers are cleared away
        try:
            return super().invoke(ctx)
        except StasisError as error:
            console = Console(stderr=True, highlight=False)
            console.print(f"[bold red]error:[/] {escape(error.message)}", soft_wrap=True)
            if error.remedy:
                console.print(f"[bold]remedy:[/] {escape(error.remedy)}", soft_wrap=True)
            sys.exit(error.exit_code)
        except ImportError as missing:
            lack = Unsupported(f"a library is missing: {missing}", remedy="pip install stasis-operator")
            click.echo(f"error: {lack}", err=True)
            sys.exit(lack.exit_code)
