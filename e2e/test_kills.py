"""Whatever is killed, and whenever: the end is the whole checkpoint, or training goes on; no rank runs twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from e2e.lab import STEPS, Cluster, Job, finish, training

pytestmark = pytest.mark.e2e

WORKERS = ("stasis-e2e-worker", "stasis-e2e-worker2")
CONTROLLER, WEBHOOK, AGENT = "-m stasis.controllers", "-m stasis.webhook", "-m stasis.daemon"


def everywhere(cluster: Cluster, pattern: str) -> None:
    found = [cluster.signal(node, pattern) for node in ("stasis-e2e-control-plane", *WORKERS)]
    assert any(found)


def on_one(cluster: Cluster, pattern: str) -> None:
    assert cluster.signal(WORKERS[0], pattern)


def restart(unit: str) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        cluster.run("docker", "exec", WORKERS[0], "systemctl", "restart", unit)

    return act


VICTIMS: dict[str, Callable[[Cluster], None]] = {
    "controllers": lambda cluster: everywhere(cluster, CONTROLLER),
    "webhooks": lambda cluster: everywhere(cluster, WEBHOOK),
    "agent": lambda cluster: on_one(cluster, AGENT),
    "agents": lambda cluster: everywhere(cluster, AGENT),
    "kubelet": restart("kubelet"),
    "containerd": restart("containerd"),
}
SOON = (0.3, 1.0, 2.0, 4.0)  # seconds after the command


def killed(job: Job, cluster: Cluster, victim: str, after: float) -> None:
    """Suspend and resume, something being killed so long after each command."""
    job.patch_suspend(True)
    time.sleep(after)
    VICTIMS[victim](cluster)
    job.wait_for_no_pods(300)
    before = {rank: job.last_step(rank) for rank in range(job.ranks)}
    job.patch_suspend(False)
    time.sleep(after)
    VICTIMS[victim](cluster)
    cluster.wait(
        f"{job.name} goes on",
        lambda: job.follow() and all(job.last_step(rank) > step for rank, step in before.items()),
        300,
    )


@pytest.mark.parametrize(
    ("victim", "after"),
    [
        ("controllers", 1.0),
        ("agents", 1.0),
        *(pytest.param(victim, after, marks=pytest.mark.slow) for victim in VICTIMS for after in SOON),
    ],
)
def test_a_killed_part_loses_nothing(
    cluster: Cluster,
    namespace: str,
    undisturbed: dict[int, list[str]],
    victim: str,
    after: float,
) -> None:
    with training(cluster, "killed", namespace, steps=STEPS, pause=0.3) as job:
        job.wait_for_step(2)
        killed(job, cluster, victim, after)
        finish(job, undisturbed)
