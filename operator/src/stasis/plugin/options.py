"""What the plugin's commands share: the cluster that they are about, and waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from stasis.plugin import show, wait
from stasis.plugin.cluster import Cluster, open_cluster

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Seconds of 90s, 15m, 2h, or of a bare number."""
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1.0)
    try:
        return float(number) * unit
    except ValueError:
        raise click.BadParameter(f"{text!r} is no duration: write 90s, 15m or 2h") from None


def timeout_option(default: str) -> Callable[[F], F]:
    return click.option("--timeout", default=default, type=duration, metavar="90s|15m|2h", show_default=True)


def wait_options(function: F) -> F:
    """`--wait`, `--timeout`."""
    waiting = click.option("--wait", "waits", is_flag=True, help="Wait until it is done, showing what happens.")
    return waiting(timeout_option("20m")(function))


def in_cluster(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the cluster; -n and --context may also stand behind the command, as with kubectl."""

    @functools.wraps(function)
    def command(namespace: str | None, context: str | None, **options: Any) -> None:
        parent = click.get_current_context().parent
        above = parent.params if parent else {}
        cluster = open_cluster(context or above.get("context"), namespace or above.get("namespace"))
        with cluster.client:
            function(cluster, **options)

    for flags in (("-n", "--namespace"), ("--context",)):
        command = click.option(*flags, hidden=True)(command)
    return command


def waited(cluster: Cluster, job: str, look: wait.Look, timeout: float) -> str:
    """`wait.until`, showing how the job stands meanwhile."""
    with show.live() as told:
        return wait.until(cluster, job, look, timeout, told)
