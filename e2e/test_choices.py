"""Another checkpoint than the last: a fork of another job's, an older one of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.lab import STEPS, WORKERS, Cluster, Job, condition, training, went_back

from stasis.demo.proof import differences

pytestmark = pytest.mark.e2e


def test_a_fork_goes_on_from_another_jobs_checkpoint_and_both_from_the_registry_alone(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]]
) -> None:
    with training(cluster, "source", namespace, steps=STEPS, pause=0.1) as source:
        source.wait_for_step(3)
        addresses = source.addresses()
        checkpoint = source.suspend()["metadata"]["name"]
        for node in WORKERS:  # all that the nodes have of it, and what the agents know
            cluster.run("docker", "exec", node, "sh", "-c", "rm -rf /var/lib/stasis/*")
            cluster.signal(node, "-m stasis.daemon")
        fork = Job(cluster, "fork", namespace)
        try:
            cluster.stasis("-n", namespace, "fork", "fork", "--from", checkpoint, "--wait")
            fork.wait_for_end()
            assert not set(fork.addresses().values()) & set(addresses.values())  # translated: the source keeps its own
            whole = {rank: source.lines(rank) + fork.lines(rank) for rank in range(2)}
            assert differences(whole, undisturbed) == []
        finally:
            fork.delete()
        source.resume()


def test_a_job_is_resumed_from_an_older_checkpoint_of_its_own(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]]
) -> None:
    with training(cluster, "older", namespace, steps=STEPS, pause=0.3) as job:
        job.wait_for_step(2)
        cluster.stasis("-n", namespace, "checkpoint", "older", "--wait")
        job.wait_for_step(job.last_step(0) + 3)
        job.suspend()
        read = {rank: len(job.lines(rank)) for rank in range(2)}
        assert len(job.checkpoints()) == 2
        first = job.checkpoints()[0]["metadata"]["name"]
        cluster.stasis("-n", namespace, "resume", "older", "--from", first, "--wait")
        job.wait_for_end()
        went_back(job, read, undisturbed)


def shm(size: str) -> dict[str, Any]:
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return {"volumes": [volume], "mounts": [{"name": "shm", "mountPath": "/dev/shm"}]}


def other_command(objects: list[Any]) -> None:
    objects[-1]["spec"]["trainer"]["command"] = ["torchrun", "/code/train.py", "--steps=7"]


def as_it_is(objects: list[Any]) -> None:
    pass


FILLED = "open('/dev/shm/data', 'wb').write(bytes(48 << 20))\n"


def test_a_fork_into_pods_that_cannot_take_it_is_refused_with_the_cause(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    image = {"image": str(cluster.run("kubectl", "-n", "stasis-system", "get", "deploy", "stasis-controller", "-o",
             "jsonpath={.spec.template.spec.containers[0].image}"))}  # fmt: skip
    forks: dict[str, tuple[dict[str, Any], Callable[[list[Any]], None], str]] = {
        "image": (shm("256Mi") | image, as_it_is, "the image was "),
        "command": (shm("256Mi"), other_command, "--steps=7"),
        "shm": (shm("32Mi"), as_it_is, "/dev/shm"),
    }
    script = FILLED + Job(cluster, "", "").script
    with training(cluster, "origin", namespace, steps=1000, script=script, **shm("256Mi")) as origin:
        origin.wait_for_step(1)
        checkpoint = origin.suspend()["metadata"]["name"]
        jobs = {
            name: Job(cluster, f"other-{name}", namespace, 1000, **options) for name, (options, _, _) in forks.items()
        }

        def refused(name: str) -> str:
            job, (_, change, _) = jobs[name], forks[name]
            *beside, trainjob = job.objects()
            change([trainjob])
            cluster.apply(*beside)
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps(trainjob))
            cluster.kubectl("stasis", "-n", namespace, "fork", job.name, "--from", checkpoint, "-f", str(file))
            told: str = cluster.wait(f"{name}: its user is told", lambda: cause(job))
            return told

        def cause(job: Job) -> str:
            found = next((c for c in job.checkpoints() if condition(c, "Restored") == "False"), None)
            return str(found["status"]["message"]) if found else ""

        try:
            with ThreadPoolExecutor() as pool:
                told = dict(zip(forks, pool.map(refused, forks), strict=True))
            for name, (_, _, word) in forks.items():
                assert word in told[name]
                assert told[name] in " ".join(jobs[name].events())
                jobs[name].wait_for_no_pods()
                jobset = cluster.get("-n", namespace, "jobset", jobs[name].name)
                assert jobset["spec"]["suspend"]
                assert not jobset["status"].get("restarts")
                (batch,) = cluster.items(
                    "-n", namespace, "jobs", "-l", f"jobset.sigs.k8s.io/jobset-name={jobs[name].name}"
                )
                assert not batch["status"].get("failed")
        finally:
            for job in jobs.values():
                job.delete()
        origin.resume()  # it has lost nothing by it
