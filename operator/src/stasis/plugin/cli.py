"""`kubectl stasis`: the program. Its commands' exit codes: command.py."""

from __future__ import annotations

import click

from stasis.command import Group
from stasis.plugin import install, jobs, logs, saved


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-n", "--namespace", help="Namespace [default: the context's].")
@click.option("--context", help="Context of the kubeconfig [default: the current one].")
def main(namespace: str | None, context: str | None) -> None:
    """Suspend TrainJobs at any instant and resume them elsewhere, with no step lost."""


for command in (*jobs.COMMANDS, *logs.COMMANDS, *saved.COMMANDS, *install.COMMANDS):
    main.add_command(command)
