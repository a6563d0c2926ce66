"""A cluster with Stasis in it, as `helm install` puts it there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.installation import ROOT, install
from e2e.lab import Cluster


@pytest.fixture(scope="session")
def bare_cluster() -> Cluster:
    """Without Stasis."""
    subprocess.run([ROOT / "e2e/cluster/up.sh"], check=True, stdout=subprocess.PIPE)
    script = 'eval "$("$0/e2e/cluster/env.sh")"; printf "%s\\n" "$PATH" "$KUBECONFIG" "$STASIS_E2E_REGISTRY"'
    out = subprocess.run(["bash", "-c", script, ROOT], check=True, stdout=subprocess.PIPE, text=True).stdout
    path, kubeconfig, registry = out.splitlines()
    return Cluster(Path(kubeconfig), path, registry)


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
