"""`kubectl patch` suspends and resumes a TrainJob, and nothing of its training is lost."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import pytest
from e2e.lab import STEPS, Cluster, condition, finish, training

pytestmark = pytest.mark.e2e

FIRST, SECOND = "stasis-e2e-worker", "stasis-e2e-worker2"


@pytest.fixture(scope="module")
def translate(cluster: Cluster, namespace: str) -> str:
    """The name of a policy under which the CNI is asked for no address, and the pods go before the registry has all."""
    cluster.apply(
        {
            "apiVersion": "stasis.dev/v1alpha1",
            "kind": "CheckpointPolicy",
            "metadata": {"name": "translate", "namespace": namespace},
            "spec": {"addresses": "Translate", "durability": "Local"},
        }
    )
    return "translate"


def test_a_suspended_job_goes_on_where_it_stopped_on_other_nodes(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]]
) -> None:
    with ExitStack() as closing:
        with cluster.only_on(FIRST):
            job = closing.enter_context(training(cluster, "gpt2", namespace, steps=STEPS, pause=0.3, spread=False))
            job.wait_for_step(3)
        before = job.pods()
        checkpoint = job.suspend()
        ranks = {rank["rank"]: rank for rank in checkpoint["status"]["ranks"]}
        assert sorted(ranks) == [0, 1]
        assert all(rank["manifest"].startswith("sha256:") for rank in ranks.values())
        with cluster.only_on(SECOND):
            job.resume()
        after = job.pods()
        assert {pod.node for pod in before.values()} == {FIRST}
        assert {pod.node for pod in after.values()} == {SECOND}
        assert {pod.rank: pod.address for pod in after.values()} == {pod.rank: pod.address for pod in before.values()}
        told = {event.partition(":")[0] for event in job.events()}
        assert told == {"Checkpointing", "Released", "Resuming", "Restored"}
        finish(job, undisturbed)


def others_take(cluster: Cluster, namespace: str, addresses: Iterable[str]) -> None:
    """While a job is suspended whose addresses are not kept, other pods get them."""
    names = []
    for number, address in enumerate(addresses):
        names.append(f"pod/other-{number}")
        image = f"{cluster.registry}/stasis-trainer:e2e"
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"other-{number}",
                    "namespace": namespace,
                    "annotations": {"stasis.dev/pod-ip": address},
                },
                "spec": {
                    "nodeName": FIRST,
                    "terminationGracePeriodSeconds": 0,
                    "containers": [{"name": "main", "image": image, "command": ["sleep", "3600"]}],
                },
            }
        )
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", *names, "--timeout=60s")
    taken = [cluster.get("-n", namespace, name)["status"]["podIP"] for name in names]
    assert taken == list(addresses)


@pytest.mark.parametrize("cycles", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_two_jobs_are_suspended_and_resumed_again_and_again_at_the_same_time(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]], translate: str, cycles: int
) -> None:
    """One with its addresses kept, one with addresses translated and uploaded after its pods are gone."""
    with (
        training(cluster, "kept", namespace, steps=STEPS, pause=0.5) as kept,
        training(cluster, "translated", namespace, steps=STEPS, pause=0.5, policy=translate) as translated,
    ):
        jobs = (kept, translated)
        for job in jobs:
            job.wait_for_step(1)
        addresses = {job.name: job.addresses() for job in jobs}
        for cycle in range(cycles):
            for job in jobs:
                job.patch_suspend(True)
            for job in jobs:
                job.wait_for_no_pods()
            if cycle == 0:
                others_take(cluster, namespace, addresses["translated"].values())
            for job in jobs:
                job.resume()
        assert kept.addresses() == addresses["kept"]
        assert set(translated.addresses().values()).isdisjoint(addresses["translated"].values())
        for job in jobs:
            assert {condition(checkpoint, "Durable") for checkpoint in job.checkpoints()} == {"True"}
            finish(job, undisturbed)


def test_a_checkpoint_is_made_while_training_goes_on(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]]
) -> None:
    with training(cluster, "busy", namespace, steps=STEPS, pause=0.3) as job:
        job.wait_for_step(2)
        uid = job.get()["metadata"]["uid"]
        cluster.apply(
            {
                "apiVersion": "stasis.dev/v1alpha1",
                "kind": "TrainJobCheckpoint",
                "metadata": {
                    "name": "busy-1",
                    "namespace": namespace,
                    "labels": {"stasis.dev/trainjob": "busy", "stasis.dev/trainjob-uid": uid},
                },
                "spec": {"trainJob": {"name": "busy", "uid": uid}, "kind": "Checkpoint"},
            }
        )
        cluster.kubectl(
            "-n", namespace, "wait", "--for=condition=Durable", "trainjobcheckpoint/busy-1", "--timeout=90s"
        )
        assert len(job.pods()) == 2
        finish(job, undisturbed)
