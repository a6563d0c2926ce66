"""Stasis in the cluster, made of this very tree, as `helm install` puts it there."""

from __future__ import annotations

import subprocess
from pathlib import Path

from e2e.lab import Cluster

ROOT = Path(__file__).parents[1]
CHART = str(ROOT / "charts/stasis")
NAMESPACE = "stasis-system"


def up() -> dict[str, str]:
    """The cluster without Stasis; the environment in which kubectl, helm and docker are those of it."""
    subprocess.run([ROOT / "e2e/cluster/up.sh"], check=True, stdout=subprocess.PIPE)
    script = 'eval "$("$0/e2e/cluster/env.sh")"; env -0'
    out = subprocess.run(["bash", "-c", script, ROOT], check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(line.split("=", 1) for line in out.rstrip("\0").split("\0"))


def install(cluster: Cluster, **others: str) -> None:
    """Or upgrade. `others`: values by name, "__" for a dot."""
    made = subprocess.run([ROOT / "e2e/cluster/images.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout
    values = ["initBuild=" + _init_build()]
    for name, image in zip(("operator", "agent", "init", "registry"), made.split(), strict=True):
        repository, _, tag = image.rpartition(":")
        values += [f"images.{name}.repository={repository}", f"images.{name}.tag={tag}"]
    values += [f"{name.replace('__', '.')}={value}" for name, value in others.items()]
    options = [option for value in values for option in ("--set-string", value)]
    cluster.run(
        "helm", "upgrade", "--install", "stasis", CHART, "-n", NAMESPACE, "--create-namespace", *options,
        "--wait", "--timeout", "4m",
    )  # fmt: skip
    # Helm waits for all agents but one.
    cluster.kubectl("-n", NAMESPACE, "rollout", "status", "daemonset/stasis-agent", "--timeout=2m")


def _init_build() -> str:
    init = subprocess.run([ROOT / "tools/init.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return subprocess.run([init, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]


if __name__ == "__main__":
    install(Cluster(up()))
