"""`stasis`: the commands. What they print comes from here; what they do, from the layers below.

command.py lists the exit codes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import stasis
from stasis import presentation as show
from stasis.command import Group, output_option

if TYPE_CHECKING:
    from stasis.store.repository import Repository


def opened(ref: str) -> Repository:
    """A folder or repository for a user who waits: one that does not answer is told soon."""
    from stasis.store.connect import open_repository
    from stasis.store.http import HttpOptions

    return open_repository(ref, http=HttpOptions(patience=5))


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(stasis.__version__, prog_name="stasis")
def main() -> None:
    """Suspend a training gang at any instant, keep its exact state, resume it elsewhere.

    A REF is a folder (./checkpoints:tag, oci:PATH:tag) or a registry's repository (host:port/name:tag).
    """


@main.command()
@output_option
def doctor(output: str) -> None:
    """What this machine has and lacks, and what each lack means."""
    from stasis.doctor import run

    sys.exit(run(output == "json"))


@main.command("try", context_settings={"ignore_unknown_options": True})
@click.option("--ranks", default=1, show_default=True, help="Ranks, each in a container with a network of its own.")
@click.option("--cycles", default=1, show_default=True, help="How often to suspend and resume.")
@click.option("--after", default=5.0, show_default=True, help="Seconds of running before each suspension.")
@click.option("--translate", is_flag=True, help="Resume under other addresses.")
@click.option("--to", "where", default="", help="REF to keep the checkpoint in; by default it is thrown away.")
@click.option("--rootfs", type=click.Path(path_type=Path), help="Root folder of the containers [default: /].")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def try_(
    ranks: int, cycles: int, after: float, translate: bool, where: str, rootfs: Path | None, command: Sequence[str]
) -> None:
    """Will my program survive? Runs COMMAND in containers, suspends and resumes it, and tells what was found.

    Exits with the command's status, or with the code of what stood in the way.
    """
    from stasis.demo.attempt import Attempt, attempt

    wanted = Attempt(tuple(command), ranks, cycles, after, translate, where, rootfs or Path("/"))
    sys.exit(attempt(wanted))


@main.command()
@click.option("--steps", default=60, show_default=True, help="Steps of the training.")
@click.option("--ranks", default=2, show_default=True)
def demo(steps: int, ranks: int) -> None:
    """Suspend a training gang in mid-step, resume it elsewhere, twice, and prove that nothing was disturbed."""
    from stasis.demo.show import run

    sys.exit(run(steps, ranks))


@main.command()
@click.argument("folder", default="../shared/cases", type=click.Path(path_type=Path))
@click.option("--only", help="Cases whose name:variant holds this.")
@click.option(
    "--cluster", "image", metavar="IMAGE", help="In the cluster of KUBECONFIG, as trainers of TrainJobs of this image."
)
@output_option
def cases(folder: Path, only: str | None, image: str | None, output: str) -> None:
    """Run programs that break checkpointing, those of FOLDER/programs, and judge each."""
    from stasis.cases import run

    sys.exit(run(folder, only, "json" if output == "json" else "table", image))


@main.command("ls")
@click.argument("ref")
@output_option
def list_(ref: str, output: str) -> None:
    """The checkpoints in a folder or repository."""
    from stasis.store.checkpoint import list_checkpoints

    with opened(ref) as repository:
        found = list_checkpoints(ref, repository)
    rows = [{"tag": c.tag, "digest": c.digest, "uid": c.uid, "ranks": c.ranks, **c.config} for c in found]
    show.rows(rows, ["tag", "ranks", "uid", "digest"], output)


@main.command()
@click.argument("ref")
@output_option
def inspect(ref: str, output: str) -> None:
    """What a checkpoint holds: ranks, sizes, deduplication, fingerprint, timings."""
    from stasis.store.checkpoint import open_checkpoint

    with opened(ref) as repository, open_checkpoint(ref, repository) as checkpoint:
        ranks = [
            {"rank": rank.rank, "digest": rank.digest, **_known(rank.config), "stats": rank.stats}
            for rank in checkpoint.ranks
        ]
        found = {"ref": ref, "digest": checkpoint.digest, "uid": checkpoint.uid, **checkpoint.config, "ranks": ranks}
    if output == "json":
        print(json.dumps(found, indent=1))
        return
    show.checkpoint(found)


def _known(config: Mapping[str, Any]) -> dict[str, Any]:
    shown = ("hostname", "addresses", "areas", "timings", "fingerprint", "world_size")
    return {name: config.get(name) for name in shown}


@main.command()
@click.argument("ref")
def verify(ref: str) -> None:
    """Re-read every byte of a checkpoint. Exits with 9 and the blob's name where one is not as it was written."""
    from stasis.store.checkpoint import verify

    size = verify(ref)
    click.echo(f"{ref}: {show.size(size)} read, every byte as it was written")


@main.command("rm")
@click.argument("ref")
def remove(ref: str) -> None:
    """Remove a checkpoint. A registry frees its blobs by its own garbage collection."""
    from stasis.store.checkpoint import remove

    with opened(ref) as repository:
        freed = remove(ref, repository)
    click.echo(f"{ref}: removed" + (f", {show.size(freed)} freed" if freed else ""))


@main.command("cp")
@click.argument("source")
@click.argument("target")
def copy(source: str, target: str) -> None:
    """Copy a checkpoint with all it needs, between folders and registries."""
    from stasis.store.checkpoint import copy

    with show.bytes_progress(f"{source} -> {target}") as advance:
        descriptor = copy(source, target, progress=advance)
    click.echo(f"{target}: {descriptor.digest}")
