"""`kubectl stasis logs`: what the ranks print, across the pods that a suspend ends and a resume makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import click

from stasis.api.names import CONTAINER
from stasis.errors import NotFound, StasisError
from stasis.kube.client import annotation, meta
from stasis.kube.ranks import rank_of
from stasis.plugin.cluster import Cluster, asked
from stasis.plugin.options import in_cluster
from stasis.plugin.snapshot import take

_POLL = 1.0  # seconds, for the next incarnation of a rank


def _pods(cluster: Cluster, job: str, rank: int | None) -> list[Mapping[str, Any]]:
    """Those that may have printed something, by rank and age."""
    pods = [pod for pod in take(cluster, job).pods if rank in (None, rank_of(pod))]
    begun = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in (None, "Pending")]
    return sorted(begun, key=lambda pod: (rank_of(pod), meta(pod).get("creationTimestamp", "")))


def _print(cluster: Cluster, pod: Mapping[str, Any], *, follow: bool, tail: int | None, prefix: bool) -> None:
    name, before = meta(pod)["name"], f"{rank_of(pod)}| " if prefix else ""
    container = annotation(pod, CONTAINER) or "node"
    with asked(f"log of pod {name}"):
        lines = cluster.client.log(
            name,
            namespace=cluster.namespace,
            container=container,
            follow=follow,
            tail_lines=tail,
            newlines=False,
        )
        for line in lines:
            click.echo(before + line)


def _follow(cluster: Cluster, job: str, rank: int, tail: int | None, prefix: bool) -> None:
    """One rank's pods, each to its end, then the next one; until the TrainJob is gone."""
    seen: set[str] = set()
    while True:
        try:
            pods = [pod for pod in _pods(cluster, job, rank) if meta(pod)["uid"] not in seen]
            for pod in pods:
                seen.add(meta(pod)["uid"])
                _print(cluster, pod, follow=True, tail=tail, prefix=prefix)
                tail = None  # of what comes later, all
        except NotFound as error:
            if "TrainJob" in error.message:
                return
        except StasisError as error:
            click.echo(f"rank {rank}: {error.message}", err=True)
        time.sleep(_POLL)


@click.command()
@click.argument("job")
@click.option("--rank", type=click.IntRange(min=0), help="One rank only [default: all].")
@click.option("-f", "--follow", is_flag=True, help="Go on, also in the pods that a resume makes.")
@click.option("--tail", type=click.IntRange(min=0), help="Last lines of each pod only.")
@in_cluster
def logs(cluster: Cluster, job: str, rank: int | None, follow: bool, tail: int | None) -> None:
    """What the ranks printed, as far as the cluster has it: a pod's log goes with the pod."""
    pods = _pods(cluster, job, rank)
    if not follow:
        if not pods:
            raise NotFound(f"no pod of {job} has a log", remedy=f"kubectl stasis status {job}")
        for pod in pods:
            _print(cluster, pod, follow=False, tail=tail, prefix=rank is None)
        return
    ranks = [rank] if rank is not None else sorted({rank_of(pod) for pod in pods}) or [0]
    arguments = (tail, len(ranks) > 1)
    threads = [threading.Thread(target=_follow, args=(cluster, job, r, *arguments), daemon=True) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


COMMANDS = (logs,)
