"""A node that dies: before a commit all ranks go back together, after it nothing is lost, and no rank runs twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from e2e.installation import NAMESPACE
from e2e.lab import STEPS, WORKERS, Cluster, finish, training, went_back

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

# A node each where there are two.
APART = {
    "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "podAffinityTerm": {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {
                        "matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]
                    },
                },
            }
        ]
    }
}


@pytest.fixture(scope="module")
def hasty(cluster: Cluster, namespace: str) -> str:
    """The name of a policy under which a node need not be away for long."""
    spec = {"lostAfterSeconds": 5}
    policy = {"metadata": {"name": "hasty", "namespace": namespace}, "spec": spec}
    cluster.apply({"apiVersion": "stasis.dev/v1alpha1", "kind": "CheckpointPolicy", **policy})
    return "hasty"


@pytest.fixture
def nodes(cluster: Cluster) -> tuple[str, str]:
    """A worker that may die, and the one with the registry."""
    (pod,) = cluster.items("-n", NAMESPACE, "pods", "-l", "app.kubernetes.io/component=registry")
    stays = pod["spec"]["nodeName"]
    (dies,) = set(WORKERS) - {stays}
    with cluster.only_on(stays):  # what the jobs of all nodes need
        for namespace, name in (("jobset-system", "jobset"), ("kubeflow-system", "kubeflow-trainer")):
            there = ("-n", namespace, "delete", "pods", "--field-selector", f"spec.nodeName={dies}")
            cluster.kubectl(*there)
            deployment = f"deployment/{name}-controller-manager"
            cluster.kubectl("-n", namespace, "rollout", "status", deployment, "--timeout=120s")
    return dies, stays


@contextlib.contextmanager
def dead(cluster: Cluster, node: str) -> Iterator[None]:
    """Its machine is off; it is back afterwards, as new."""
    cluster.run("docker", "kill", node)
    try:
        yield
    finally:
        cluster.kubectl("delete", "node", node, "--ignore-not-found")
        cluster.run("docker", "start", node)
        cluster.wait(f"{node} is back", lambda: node in cluster.kubectl("get", "nodes", "-o", "name"), 120)
        cluster.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=180s")
        cluster.kubectl("-n", NAMESPACE, "rollout", "status", "daemonset/stasis-agent", "--timeout=180s")


def test_a_node_that_dies_after_the_commit_takes_nothing_with_it(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]], nodes: tuple[str, str]
) -> None:
    dies, stays = nodes
    with contextlib.ExitStack() as closing:
        with cluster.only_on(dies):
            job = closing.enter_context(training(cluster, "outlives", namespace, steps=STEPS, pause=0.3, spread=False))
            job.wait_for_step(2)
        job.suspend()
        with dead(cluster, dies):
            cluster.kubectl("cordon", dies)
            job.resume()
            assert {pod.node for pod in job.pods().values()} == {stays}
            finish(job, undisturbed)


def test_ranks_whose_node_dies_before_the_commit_go_back_to_the_last_checkpoint_with_all_others(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]], nodes: tuple[str, str], hasty: str
) -> None:
    dies, _ = nodes
    with training(
        cluster, "loses", namespace, steps=STEPS, pause=0.3, spread=False, patch={"affinity": APART}, policy=hasty
    ) as job:
        job.wait_for_step(2)
        assert dies in {pod.node for pod in job.pods().values()}
        cluster.stasis("-n", namespace, "checkpoint", "loses", "--wait")
        job.wait_for_step(job.last_step(0) + 3)
        with dead(cluster, dies):
            job.patch_suspend(True)
            assert f"node {dies} is not ready" in job.told("RolledBack", 300)
            cluster.wait("the others' pods end", lambda: not job.pods(), 120)
            read = {rank: len(job.lines(rank)) for rank in range(2)}
            job.patch_suspend(False)
            assert f"on node {dies}" in job.told("WaitingForNode", 60)
            assert not job.pods()
            cluster.kubectl("delete", "node", dies)  # its pods are collected a minute later
            job.wait_for_end()
            went_back(job, read, undisturbed)
