"""Stasis in the cluster, made of this very tree, as `helm install` puts it there."""

from __future__ import annotations

import subprocess
from pathlib import Path

from e2e.lab import Cluster

ROOT = Path(__file__).parents[1]
CHART = str(ROOT / "charts/stasis")
NAMESPACE = "stasis-system"


def install(cluster: Cluster) -> None:
    """Or upgrade."""
    made = subprocess.run([ROOT / "e2e/cluster/images.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout
    values = ["initBuild=" + _init_build()]
    for name, image in zip(("operator", "agent", "init", "registry"), made.split(), strict=True):
        repository, _, tag = image.rpartition(":")
        values += [f"images.{name}.repository={repository}", f"images.{name}.tag={tag}"]
    options = [option for value in values for option in ("--set-string", value)]
    cluster.run(
        "helm", "upgrade", "--install", "stasis", CHART, "-n", NAMESPACE, "--create-namespace", *options,
        "--wait", "--timeout", "4m",
    )  # fmt: skip


def _init_build() -> str:
    init = subprocess.run([ROOT / "tools/init.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return subprocess.run([init, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
