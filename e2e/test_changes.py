"""Users change their minds, trainers crash, jobs and namespaces are deleted: at any time."""

from __future__ import annotations

import pytest
from e2e.lab import STEPS, Cluster, Job, finish, training

pytestmark = pytest.mark.e2e


def test_a_trainer_that_fails_after_a_resume_is_restarted_in_place(cluster: Cluster, namespace: str) -> None:
    with training(cluster, "failing", namespace, steps=1000, patch={"restartPolicy": "OnFailure"}) as job:
        job.wait_for_step(1)
        job.suspend()
        job.resume()
        pod = job.pods()[0]
        assert cluster.signal(pod.node, "-u /code/train.py")

        def restarted() -> bool:
            (status,) = cluster.get("-n", namespace, "pod", pod.name)["status"]["containerStatuses"]
            return bool(status["restartCount"]) and "running" in status["state"]

        cluster.wait("its container is started again", restarted)
        logs = ("-n", namespace, "logs", pod.name, "-c", "node")
        cluster.wait("it trains anew", lambda: "\nstep 1 " in "\n" + cluster.kubectl(*logs))
        assert job.pods()[0].uid == pod.uid


def test_the_last_of_many_suspends_and_resumes_counts(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]]
) -> None:
    with training(cluster, "hasty", namespace, steps=STEPS, pause=0.3) as job:
        job.wait_for_step(2)
        for _ in range(20):
            job.patch_suspend(True)
            job.patch_suspend(False)
        job.wait_for_step(job.last_step(0) + 3)
        for suspend in (True, False, True):
            job.patch_suspend(suspend)
        job.wait_for_no_pods()
        job.resume()
        finish(job, undisturbed)


def test_what_is_discarded_or_made_anew_begins_anew(cluster: Cluster, namespace: str) -> None:
    with training(cluster, "anew", namespace, steps=1000) as job:
        job.wait_for_step(1)
        cluster.stasis("-n", namespace, "suspend", "anew", "--discard", "--wait")
        job.wait_for_no_pods()
        assert job.checkpoints() == []
        cluster.stasis("-n", namespace, "resume", "anew", "--wait")
        job.wait_for_beginnings(2)
        job.patch_suspend(True)
        cluster.wait("a checkpoint is begun", job.checkpoints)
        job.delete()
        cluster.wait("nothing of it is left", lambda: not job.all_pods())
        job.create()
        job.wait_for_beginnings(3)


def test_a_namespace_is_deleted_in_mid_checkpoint(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "e2e-going")
    job = Job(cluster, "going", "e2e-going", steps=1000)
    job.create()
    job.wait_for_step(1)
    job.patch_suspend(True)
    cluster.wait("a checkpoint is begun", job.checkpoints)
    cluster.kubectl("delete", "namespace", "e2e-going", "--timeout=120s")
