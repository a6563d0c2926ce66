"""A cluster with Stasis in it, as `helm install` puts it there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.installation import ROOT, install, up
from e2e.lab import STEPS, Cluster, training


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin of kubectl, made of this very tree."""
    folder = tmp_path_factory.mktemp("bin")
    plugin = folder / "kubectl-stasis"
    command = f"{sys.executable} -c 'from stasis.plugin.cli import main; main()'"
    plugin.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}/operator/src exec {command} "$@"\n')
    plugin.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def bare_cluster(programs: Path) -> Cluster:
    """Without Stasis."""
    environment = up()
    return Cluster({**environment, "PATH": f"{programs}:{environment['PATH']}"})


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
