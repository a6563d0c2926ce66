"""A cluster with Stasis in it, as `helm install` puts it there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from e2e.installation import ROOT, install
from e2e.lab import STEPS, Cluster, training


@pytest.fixture(scope="session")
def bare_cluster() -> Cluster:
    """Without Stasis."""
    subprocess.run([ROOT / "e2e/cluster/up.sh"], check=True, stdout=subprocess.PIPE)
    script = 'eval "$("$0/e2e/cluster/env.sh")"; env -0'
    out = subprocess.run(["bash", "-c", script, ROOT], check=True, stdout=subprocess.PIPE, text=True).stdout
    return Cluster(dict(line.split("=", 1) for line in out.rstrip("\0").split("\0")))


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster) -> Cluster:
    """With Stasis, made of this very tree."""
    install(bare_cluster)
    return bare_cluster


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """One of the module's own."""
    name = "e2e-" + request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name)


@pytest.fixture(scope="session")
def undisturbed(bare_cluster: Cluster) -> dict[int, list[str]]:
    """The log, by rank, of a run that Stasis has nothing to do with."""
    bare_cluster.kubectl("create", "namespace", "e2e-undisturbed")
    try:
        with training(bare_cluster, "undisturbed", "e2e-undisturbed", steps=STEPS, pause=0.05, policy="") as job:
            job.wait_for_step(0)
            job.wait_for_end()
            return {rank: job.lines(rank) for rank in range(job.ranks)}
    finally:
        bare_cluster.kubectl("delete", "namespace", "e2e-undisturbed", "--wait=false")
