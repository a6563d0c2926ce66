"""Which rank a pod is: over all trainers of a JobSet, each rank once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stasis.api import names
from stasis.kube.ranks import is_rank, rank_of, trainers
from stasis.webhook.jobsets import jobsets
from stasis.webhook.review import Request

STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def job(name: str, pods: int, replicas: int | None = None, step: str = "trainer") -> dict[str, Any]:
    labels = {STEP: step} if step else {}
    spec = {"completions": pods, "parallelism": pods, "template": {"spec": {"containers": []}}}
    return {"name": name, "template": {"metadata": {"labels": labels}, "spec": spec}} | (
        {} if replicas is None else {"replicas": replicas}
    )


def jobset(*jobs: dict[str, Any]) -> dict[str, Any]:
    about = {"name": "gpt", "namespace": "n", "labels": {names.POLICY_LABEL: "default"}}
    return {"metadata": about, "spec": {"suspend": False, "replicatedJobs": list(jobs)}}


def admitted(before: dict[str, Any]) -> dict[str, Any]:
    answer = jobsets(Request("1", "JobSet", "CREATE", "n", "gpt", before, {}))
    assert answer.object is not None
    return dict(answer.object)


def pods_of(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    """As the JobSet and Job controllers make them."""
    made = []
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        about = spec["template"].get("metadata") or {}
        for replica in range(job.get("replicas", 1)):
            for index in range(spec["completions"]):
                labels = {**about.get("labels", {}), "jobset.sigs.k8s.io/job-index": str(replica)}
                notes = {**about.get("annotations", {}), names.COMPLETION_INDEX: str(index)}
                made.append({"metadata": {"labels": labels, "annotations": notes}})
    return made


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
def test_every_pod_of_every_trainer_is_a_rank_of_its_own(shapes: list[tuple[int, int]]) -> None:
    jobs = [job(f"worker-{number}", *shape) for number, shape in enumerate(shapes)]
    found = admitted(jobset(job("dataset-initializer", 1, step="dataset-initializer"), *jobs))
    initializer, *ranks = pods_of(found)
    assert not is_rank(initializer)
    assert [rank_of(pod) for pod in ranks] == list(range(len(ranks)))
    assert all(is_rank(pod) for pod in ranks)
    assert sum(trainer.ranks for trainer in trainers(found)) == len(ranks)


def test_a_trainer_may_have_any_name_and_its_index_alone_is_the_rank_where_it_can_be() -> None:
    found = admitted(jobset(job("workers", 2)))
    assert [rank_of(pod) for pod in pods_of(found)] == [0, 1]
    assert names.RANKS not in found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"].get(
        "annotations", {}
    )


def test_all_are_trainers_where_none_is_marked() -> None:
    found = admitted(jobset(job("launcher", 1, step=""), job("workers", 2, 2, step="")))
    assert [rank_of(pod) for pod in pods_of(found)] == [0, 1, 2, 3, 4]
