"""Commands about the installation."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click
from rich.markup import escape

from stasis.command import output_option
from stasis.errors import Unsupported
from stasis.plugin import installation, show
from stasis.plugin.cluster import INSTALL, Cluster
from stasis.plugin.options import in_cluster
from stasis.presentation import output as stdout

_STYLES = {"ok": "green", "warn": "yellow", "lack": "bold red"}


@click.command()
@output_option
@in_cluster
def doctor(cluster: Cluster, output: str) -> None:
    """Is Stasis well in this cluster? Its parts, and each node's agent. Exits with 4 where something is lacking."""
    found = installation.examine(cluster)
    lacking = [item for item in found if item.status == "lack"]
    if output == "json":
        show.as_json({"ok": not lacking, "found": [asdict(item) for item in found]})
    else:
        out, area = stdout(), ""
        for item in found:
            if item.area != area:
                area = item.area
                out.print(f"[bold]{area}[/]")
            words = f"  [{_STYLES[item.status]}]{item.status:4}[/] {escape(item.name)}: {escape(item.found)}"
            out.print(words, soft_wrap=True, highlight=False)
            if item.remedy:
                out.print(f"       [dim]remedy: {escape(item.remedy)}[/]", soft_wrap=True, highlight=False)
    sys.exit(Unsupported.exit_code if lacking else 0)


@click.command()
@output_option
@in_cluster
def version(cluster: Cluster, output: str) -> None:
    """Of this program, and of what is installed in the cluster."""
    found = installation.versions(cluster)
    if output == "json":
        show.as_json(found)
        return
    click.echo(f"kubectl-stasis {found['plugin']}")
    for part, image in found["installed"].items():
        click.echo(f"{part}: {image}")
    if not found["installed"]:
        click.echo(f"not installed in this cluster: {INSTALL}")


COMMANDS = (doctor, version)
