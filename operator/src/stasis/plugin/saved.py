"""Commands about checkpoints."""

from __future__ import annotations

import click

from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.command import output_option
from stasis.errors import Corrupt, Denied, NotFound, StoreError, Unavailable, UsageError
from stasis.plugin import imports, show
from stasis.plugin.cluster import Cluster
from stasis.plugin.installation import find_namespace
from stasis.plugin.options import in_cluster
from stasis.plugin.snapshot import checkpoint, checkpoints
from stasis.presentation import size


@click.command("ls")
@click.argument("job", required=False)
@output_option
@in_cluster
def list_(cluster: Cluster, job: str | None, output: str) -> None:
    """The namespace's checkpoints, or one TrainJob's, and what they take."""
    found = checkpoints(cluster, job)
    if output == "json":
        show.as_json([show.checkpoint_row(item) for item in found])
    else:
        show.checkpoints(found, cluster.namespace)


@click.command()
@click.argument("name", metavar="CHECKPOINT")
@output_option
@in_cluster
def inspect(cluster: Cluster, name: str, output: str) -> None:
    """What a checkpoint holds: its conditions, ranks, sizes, timings."""
    found = checkpoint(cluster, name)
    if output == "json":
        show.as_json(found.to_dict())
    else:
        show.checkpoint(found)


@click.command()
@click.argument("name", metavar="CHECKPOINT")
@in_cluster
def verify(cluster: Cluster, name: str) -> None:
    """Re-read every byte of a checkpoint, from here. Exits with 9 and the blob's name where one is not as written."""
    from stasis.store.checkpoint import verify
    from stasis.store.connect import open_repository
    from stasis.store.http import HttpOptions

    reference = _reference(checkpoint(cluster, name))
    try:
        with open_repository(reference, http=HttpOptions(patience=5)) as repository:
            read = verify(reference, repository)
    except Corrupt:
        raise
    except StoreError as error:
        error.remedy = error.remedy or _elsewhere(cluster, reference, error)
        raise
    click.echo(f"trainjobcheckpoint/{name}: {size(read)} read, every byte as it was written")


def _reference(found: TrainJobCheckpoint) -> str:
    status, name = found.status, found.metadata.name
    if status is None or not status.repository or not (status.index or status.tag):
        raise UsageError(f"checkpoint {name} is not in a registry", remedy=f"kubectl stasis inspect {name}")
    return f"{status.repository}@{status.index}" if status.index else f"{status.repository}:{status.tag}"


def _elsewhere(cluster: Cluster, reference: str, error: StoreError) -> str:
    """Where the registry can be reached, if not from here."""
    if not isinstance(error, Unavailable | Denied | NotFound):
        return ""
    where = f"kubectl -n {find_namespace(cluster)} exec deploy/stasis-controller -- python3 -m stasis verify"
    return f"where this machine cannot reach the registry, read it from inside the cluster: {where} {reference}"


@click.command("import")
@click.argument("reference", metavar="REF")
@click.option("--job", help="TrainJob that it was of [default: as it says itself].")
@click.option("--name", help="Of the TrainJobCheckpoint [default: JOB-import-N].")
@click.option("--policy", default="default", show_default=True)
@in_cluster
def import_(cluster: Cluster, reference: str, job: str | None, name: str | None, policy: str) -> None:
    """Take a checkpoint that is in a registry into this cluster, for admins.

    REF is HOST/NAME:TAG, which must be reachable from here and from the nodes. `fork` then makes a TrainJob of it.
    """
    made = imports.take_in(cluster, reference, job=job, name=name, policy=policy)
    click.echo(f"trainjobcheckpoint/{made} imported; next: kubectl stasis fork NEW-JOB --from {made} -f trainjob.yaml")


COMMANDS = (list_, inspect, verify, import_)
