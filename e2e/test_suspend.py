"""`kubectl patch` suspends and resumes a TrainJob, and nothing of its training is lost."""

from __future__ import annotations

import pytest
from e2e.lab import Cluster, training

from stasis.demo.proof import differences

pytestmark = pytest.mark.e2e

STEPS = 60


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, namespace: str) -> dict[int, list[str]]:
    """The log of a run that Stasis has nothing to do with."""
    with training(cluster, "undisturbed", namespace, steps=STEPS, pause=0, policy="") as job:
        job.wait_for_step(0)
        job.wait_for_end()
        return {rank: job.lines(rank) for rank in range(job.ranks)}


def test_a_suspended_job_goes_on_where_it_stopped(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]]
) -> None:
    with training(cluster, "gpt2", namespace, steps=STEPS, pause=0.3) as job:
        job.wait_for_step(3)
        before = job.pods()
        checkpoint = job.suspend()
        ranks = {rank["rank"]: rank for rank in checkpoint["status"]["ranks"]}
        assert sorted(ranks) == [0, 1]
        assert all(rank["manifest"].startswith("sha256:") for rank in ranks.values())
        job.resume()
        after = job.pods()
        assert {pod.uid for pod in after.values()}.isdisjoint({pod.uid for pod in before.values()})
        job.wait_for_end()
        assert differences({rank: job.lines(rank) for rank in range(job.ranks)}, undisturbed) == []
