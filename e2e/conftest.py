"""A cluster with Stasis in it, as `helm install` puts it there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.lab import Cluster

ROOT = Path(__file__).parents[1]
NAMESPACE = "stasis-system"


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
    made = subprocess.run([ROOT / "e2e/cluster/images.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout
    values = ["initBuild=" + _init_build()]
    for name, image in zip(("operator", "agent", "init", "registry"), made.split(), strict=True):
        repository, _, tag = image.rpartition(":")
        values += [f"images.{name}.repository={repository}", f"images.{name}.tag={tag}"]
    chart = str(ROOT / "charts/stasis")
    bare_cluster.run("helm", "dependency", "build", chart)
    options = [option for value in values for option in ("--set-string", value)]
    bare_cluster.run(
        "helm", "upgrade", "--install", "stasis", chart, "-n", NAMESPACE, "--create-namespace", *options,
        "--wait", "--timeout", "4m",
    )  # fmt: skip
    return bare_cluster


def _init_build() -> str:
    init = subprocess.run([ROOT / "tools/init.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return subprocess.run([init, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """One of the module's own."""
    name = "e2e-" + request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name)
