"""What cannot be checkpointed or restored: its user is told why, nothing is lost, nothing loops."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from e2e.installation import NAMESPACE
from e2e.lab import TRAIN, Cluster, condition, training

pytestmark = pytest.mark.e2e

# A userfaultfd of user mode, which needs no privilege.
USERFAULTFD = "import ctypes; assert ctypes.CDLL(None).syscall(323, 0o2000000 | 1) >= 0\n" + TRAIN.read_text()
# What a program or a pod has that no checkpoint can hold; the reason and a word of the event that tells it.
BAD: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "userfaultfd": (
        {"script": USERFAULTFD, "patch": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}},
        "Aborted",
        "userfaultfd",
    ),
    "users": ({"patch": {"hostUsers": False}}, "Refused", "hostUsers"),
}


@pytest.fixture(scope="module")
def policies(cluster: Cluster, namespace: str) -> None:
    for name, on_failure in (("keep", "KeepRunning"), ("go", "Suspend")):
        cluster.apply(
            {
                "apiVersion": "stasis.dev/v1alpha1",
                "kind": "CheckpointPolicy",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"onFailure": on_failure},
            }
        )


@pytest.mark.parametrize(
    ("what", "other"), [("userfaultfd", "users"), pytest.param("users", "userfaultfd", marks=pytest.mark.slow)]
)
def test_what_cannot_be_checkpointed_is_named_and_its_policy_decides(
    cluster: Cluster, namespace: str, policies: None, what: str, other: str
) -> None:
    with (
        training(cluster, f"{what}-keep", namespace, steps=1000, policy="keep", **BAD[what][0]) as keep,
        training(cluster, f"{other}-go", namespace, steps=1000, policy="go", **BAD[other][0]) as go,
    ):
        for job in (keep, go):
            job.wait_for_step(1)
        for job in (keep, go):
            job.patch_suspend(True)
        for job, (_, reason, word) in ((keep, BAD[what]), (go, BAD[other])):
            assert word in job.told(reason)
            assert word in cluster.kubectl("-n", namespace, "describe", "trainjob", job.name)
        assert BAD[other][2] in go.told("SuspendedWithoutCheckpoint")
        go.wait_for_no_pods()
        go.patch_suspend(False)
        keep.wait_for_step(keep.last_step(0) + 3)
        assert keep.beginnings() == 1
        go.wait_for_beginnings(2)


def test_a_job_of_which_nothing_runs_yet_is_suspended_at_once(cluster: Cluster, namespace: str) -> None:
    """It waits for a node, for an image, for its init container, for its initializer."""
    image = f"{cluster.registry}/stasis-trainer:e2e"
    slow = {"name": "slow", "image": image, "command": ["sleep", "1000"]}
    waiting: dict[str, dict[str, Any]] = {
        "node": {"patch": {"nodeSelector": {"nowhere": "to-be-found"}}},
        "image": {"image": f"{cluster.registry}/not-there:yet"},
        "init": {"patch": {"initContainers": [slow]}},
        "initializer": {"before": "sleep 1000"},
    }
    with ExitStack() as closing:
        jobs = {
            name: closing.enter_context(training(cluster, f"waits-for-{name}", namespace, **options))
            for name, options in waiting.items()
        }
        for name, job in jobs.items():
            pods = 1 if name == "initializer" else 2
            cluster.wait(f"{job.name} has its pods", lambda job=job, pods=pods: len(job.all_pods()) == pods)
        for job in jobs.values():
            job.patch_suspend(True)
        for job in jobs.values():
            job.wait_for_no_pods(60)
            job.told("NothingToSave")
            assert job.checkpoints() == []


def test_a_restore_whose_bytes_are_gone_waits_for_its_user(cluster: Cluster, namespace: str) -> None:
    with training(cluster, "robbed", namespace, steps=1000) as job:
        job.wait_for_step(1)
        checkpoint = job.suspend()
        digest = checkpoint["status"]["ranks"][1]["manifest"].removeprefix("sha256:")
        remove_from_registry(cluster, digest)
        job.patch_suspend(False)
        assert digest in job.told("NotRestorable")
        assert not job.all_pods()
        found = job.checkpoints()[-1]
        assert condition(found, "Restored") == "False"
        jobset = cluster.get("-n", namespace, "jobset", job.name)
        assert jobset["spec"]["suspend"]
        assert not jobset["status"].get("restarts")


def remove_from_registry(cluster: Cluster, digest: str) -> None:
    """A blob, from the folder that the chart's registry keeps on its node."""
    claim = cluster.get("-n", NAMESPACE, "pvc", "stasis-registry")
    volume = cluster.get("pv", claim["spec"]["volumeName"])["spec"]
    (term,) = volume["nodeAffinity"]["required"]["nodeSelectorTerms"]
    (node,) = term["matchExpressions"][0]["values"]
    found = f"find {volume['local']['path']} -path '*/{digest}/data'"
    cluster.run("docker", "exec", node, "sh", "-c", f"rm $({found})")
