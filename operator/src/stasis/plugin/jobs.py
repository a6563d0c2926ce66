"""Commands about a TrainJob."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

import click
from rich.console import Console

from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.command import output_option
from stasis.errors import Finding, NotFound, Refused, StasisError, Unavailable, UsageError
from stasis.plugin import actions, show, wait
from stasis.plugin.cluster import Cluster
from stasis.plugin.options import in_cluster, timeout_option, wait_options, waited
from stasis.plugin.snapshot import Snapshot, take
from stasis.plugin.snapshot import checkpoint as checkpoint_named
from stasis.plugin.standing import Phase, standing, under_way
from stasis.presentation import output as stdout


@click.command()
@click.argument("job")
@click.option("-w", "--watch", is_flag=True, help="Go on showing, until interrupted.")
@output_option
@in_cluster
def status(cluster: Cluster, job: str, watch: bool, output: str) -> None:
    """How a TrainJob stands: its phase, and what each rank does."""
    if watch and output == "table":
        with show.live(Console(highlight=False)) as told:
            while True:
                told(standing(take(cluster, job)))
                time.sleep(wait.INTERVAL)
    last: dict[str, Any] | None = None
    while True:
        found = standing(take(cluster, job))
        if output == "table":
            stdout().print(show.standing(found))
        elif found.to_dict() != last:
            last = found.to_dict()
            show.as_json(last)
        if not watch:
            return
        time.sleep(wait.INTERVAL)


@click.command()
@click.argument("job")
@timeout_option("60s")
@output_option
@in_cluster
def check(cluster: Cluster, job: str, timeout: float, output: str) -> None:
    """Could a running TrainJob be checkpointed now? Nothing is frozen.

    Exits with 3 where something stands against it.
    """
    take(cluster, job)
    found = wait.answer(cluster, job, actions.ask_check(cluster, job), timeout)
    if output == "json":
        show.as_json(found)
    else:
        show.findings(found)
    if found.get("error"):
        raise StasisError(f"nothing was checked: {found['error']}", remedy=found.get("remedy", ""))
    if any(rank.get("error") for rank in found["ranks"]):
        raise Unavailable("not every rank could be checked", remedy="kubectl stasis doctor")
    if any(rank.get("findings") for rank in found["ranks"]):
        sys.exit(Refused.exit_code)


@click.command()
@click.argument("job")
@wait_options
@click.option("--discard", is_flag=True, help="Save nothing: a resume starts from the beginning.")
@in_cluster
def suspend(cluster: Cluster, job: str, waits: bool, timeout: float, discard: bool) -> None:
    """Save a TrainJob and let its pods go.

    The TrainJob's own condition Suspended is true at once, before anything is saved; --wait waits for the checkpoint.
    """
    before = take(cluster, job)
    actions.suspend(cluster, before, discard=discard)
    done = waited(cluster, job, wait.suspended(before), timeout) if waits else "is to be suspended"
    click.echo(f"trainjob/{job}: {done}")


@click.command()
@click.argument("job")
@click.option("--from", "origin", metavar="CHECKPOINT", help="Another checkpoint than the last.")
@wait_options
@in_cluster
def resume(cluster: Cluster, job: str, origin: str | None, waits: bool, timeout: float) -> None:
    """Bring a suspended TrainJob back, where it stopped."""
    before = take(cluster, job)
    if origin:
        chosen = checkpoint_named(cluster, origin)
        _choose(cluster, before, chosen)
    actions.resume(cluster, before)
    done = waited(cluster, job, wait.resumed(before), timeout) if waits else "is to be resumed"
    click.echo(f"trainjob/{job}: {done}")


def _choose(cluster: Cluster, before: Snapshot, chosen: TrainJobCheckpoint) -> None:
    since = wait.seen(cluster, before.name)
    actions.choose(cluster, before, chosen)
    own = chosen.spec.train_job.uid == before.uid
    _accepted(cluster, before.name, chosen.metadata.name if own else None, since)


def _accepted(cluster: Cluster, job: str, name: str | None, since: frozenset[str]) -> None:
    """Wait for the controller to take the chosen checkpoint up, or to refuse it."""
    look = wait.chosen(name)

    def accepted(snapshot: Snapshot) -> str | None:
        if cause := wait.refusal(cluster, job, since):
            raise wait.failure(Refused.__name__, cause, Refused)
        return look(snapshot)

    wait.until(cluster, job, accepted, 60, lambda found: None)


@click.command()
@click.argument("job")
@wait_options
@in_cluster
def checkpoint(cluster: Cluster, job: str, waits: bool, timeout: float) -> None:
    """Save a running TrainJob now; it goes on."""
    name = actions.checkpoint(cluster, take(cluster, job))
    done = waited(cluster, job, wait.checkpointed(name), timeout) if waits else f"is to be saved as {name}"
    click.echo(f"trainjob/{job}: {done}")


@click.command()
@click.argument("job")
@wait_options
@in_cluster
def cancel(cluster: Cluster, job: str, waits: bool, timeout: float) -> None:
    """Take back what is under way: a suspend, a checkpoint, or a resume.

    What has been released meanwhile stays so: the TrainJob comes back from its checkpoint.
    """
    snapshot = take(cluster, job)
    active = under_way(snapshot)
    match standing(snapshot).phase:
        case Phase.CHECKPOINTING if active:
            actions.delete(cluster, active[0].metadata.name)
            done = f"checkpoint {active[0].metadata.name} is cancelled"
        case Phase.SUSPENDING:
            actions.resume(cluster, snapshot)
            done = "is no longer to be suspended"
        case Phase.RESUMING | Phase.RESTORING:
            actions.suspend(cluster, snapshot, discard=False)
            done = "is to stay suspended"
        case _ if snapshot.suspend and not snapshot.jobset_suspended:
            actions.resume(cluster, snapshot)
            done = "is no longer to be suspended"
        case phase:
            raise UsageError(f"TrainJob {job} is {str(phase).lower()}: nothing is under way")
    if waits:
        done += f"; {waited(cluster, job, wait.cancelled, timeout)}"
    click.echo(f"trainjob/{job}: {done}")


@click.command()
@click.argument("job")
@click.option("--from", "origin", required=True, metavar="CHECKPOINT", help="Of another TrainJob.")
@click.option("-f", "--file", type=click.File(), help="The fork's TrainJob [default: as the checkpoint's].")
@click.option("--share-volumes", is_flag=True, help="Let it write to volumes that the running source writes to.")
@wait_options
@in_cluster
def fork(
    cluster: Cluster, job: str, origin: str, file: TextIO | None, share_volumes: bool, waits: bool, timeout: float
) -> None:
    """Make a new TrainJob, JOB, that goes on from another one's checkpoint, in a repository of its own."""
    chosen = checkpoint_named(cluster, origin)
    actions.restorable(chosen)
    template = actions.template(file) if file else actions.source(cluster, chosen)
    if not share_volumes:
        _refuse_shared(cluster, chosen)
    since = wait.seen(cluster, job)
    actions.fork(cluster, job, chosen, template, share_volumes=share_volumes)
    _accepted(cluster, job, None, since)
    before = take(cluster, job)
    actions.resume(cluster, before)
    done = waited(cluster, job, wait.resumed(before), timeout) if waits else f"is to go on from {origin}"
    click.echo(f"trainjob/{job}: {done}")


def _refuse_shared(cluster: Cluster, chosen: TrainJobCheckpoint) -> None:
    try:
        snapshot = take(cluster, chosen.spec.train_job.name)
    except NotFound:
        return
    if claims := actions.written_volumes(snapshot):
        raise Refused(
            [
                Finding(
                    f"TrainJob {snapshot.name} runs and may write to the volumes {', '.join(claims)}",
                    "suspend it, or accept with --share-volumes that both write there",
                )
            ]
        )


COMMANDS = (status, check, suspend, resume, checkpoint, cancel, fork)
