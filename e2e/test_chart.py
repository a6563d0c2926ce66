"""What the chart's hooks promise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e.installation import NAMESPACE, install
from e2e.lab import STEPS, Cluster, finish, training

pytestmark = pytest.mark.e2e


@pytest.fixture
def reinstalled(cluster: Cluster) -> Iterator[None]:
    """The others find Stasis there again."""
    yield
    install(cluster)


def test_helm_test_finds_that_all_works(cluster: Cluster) -> None:
    assert "Succeeded" in cluster.run("helm", "test", "stasis", "-n", NAMESPACE)


def test_an_uninstall_is_refused_while_a_suspended_job_depends_on_it(cluster: Cluster, namespace: str) -> None:
    with training(cluster, "held", namespace, steps=1000) as job:
        job.wait_for_step(1)
        job.suspend()
        cluster.run("helm", "uninstall", "stasis", "-n", NAMESPACE, check=False)
        assert f"{namespace}/held" in cluster.kubectl("-n", NAMESPACE, "logs", "job/stasis-uninstall-guard")
        assert cluster.items("-n", NAMESPACE, "pods", "-l", "app.kubernetes.io/component=controller")
        # Helm takes the release for one that is being uninstalled, until it is told otherwise.
        revision = json.loads(cluster.run("helm", "history", "stasis", "-n", NAMESPACE, "-o", "json"))[-1]["revision"]
        cluster.run("helm", "rollback", "stasis", str(revision), "-n", NAMESPACE, "--wait")
        install(cluster)
        job.resume()


def replacing(cluster: Cluster) -> bool:
    status = cluster.get("-n", NAMESPACE, "daemonset", "stasis-agent")["status"]
    return bool(status.get("updatedNumberScheduled", 0) < status["desiredNumberScheduled"])


def test_an_upgrade_in_mid_checkpoint_loses_nothing(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]], reinstalled: None
) -> None:
    with training(cluster, "upgraded", namespace, steps=STEPS, pause=0.3) as job:
        job.wait_for_step(2)
        with ThreadPoolExecutor() as pool:
            levels = {"agent__logLevel": "debug", "controller__logLevel": "debug"}
            upgraded = pool.submit(install, cluster, **levels)  # all agents and controllers are made anew
            cluster.wait("the agents are being replaced", lambda: replacing(cluster) or upgraded.done())
            job.patch_suspend(True)
            upgraded.result()
        job.wait_for_no_pods()
        job.resume()
        finish(job, undisturbed)


def test_an_uninstall_leaves_jobs_running_and_no_webhook(cluster: Cluster, namespace: str, reinstalled: None) -> None:
    with training(cluster, "left", namespace, steps=1000) as job:
        job.wait_for_step(1)
        cluster.run("helm", "uninstall", "stasis", "-n", NAMESPACE, "--wait", "--timeout", "2m")
        assert cluster.items("mutatingwebhookconfigurations", "-l", "app.kubernetes.io/name=stasis") == []
        job.wait_for_step(job.last_step(0) + 3)
        cluster.kubectl("get", "crd", "trainjobcheckpoints.stasis.dev")  # with the checkpoints of all namespaces
