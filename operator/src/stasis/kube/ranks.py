"""Which pods of a JobSet are the ranks of a gang, and which rank each of them is.

The ranks are the pods of the replicated jobs that Trainer calls trainers, in the order of the JobSet, of their replicas
and of the completion indexes. What a pod cannot know of that is in an annotation of its template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stasis.api import names
from stasis.kube.client import annotation, label

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_JOB_INDEX = "jobset.sigs.k8s.io/job-index"


@dataclass(frozen=True)
class Trainer:
    """A replicated job whose pods are ranks from `first` on, `pods` in each of its replicas."""

    template: dict[str, Any]  # of its pods
    first: int
    pods: int
    replicas: int

    @property
    def ranks(self) -> int:
        return self.pods * self.replicas

    def place(self) -> str:
        """For the annotation of the template; none where the completion index alone is the rank."""
        return f"{self.first}/{self.pods}" if self.first or self.replicas > 1 else ""


def trainers(jobset: Mapping[str, Any]) -> list[Trainer]:
    """All replicated jobs where none is marked by Trainer."""
    jobs = jobset["spec"].get("replicatedJobs") or []
    steps = [(job["template"].get("metadata") or {}).get("labels") or {} for job in jobs]
    marked = any(step.get(_STEP) for step in steps)
    found: list[Trainer] = []
    for job, step in zip(jobs, steps, strict=True):
        if marked and step.get(_STEP) != "trainer":
            continue
        spec = job["template"]["spec"]
        pods = int(spec.get("completions") or spec.get("parallelism") or 1)
        first = sum(trainer.ranks for trainer in found)
        replicas = job.get("replicas")
        found.append(Trainer(spec["template"], first, pods, 1 if replicas is None else int(replicas)))
    return found


def is_rank(pod: Any) -> bool:
    """Whether it is one of the ranks' pods, and not an initializer's."""
    return bool(label(pod, names.POLICY_LABEL)) and _index(pod) is not None


def rank_of(pod: Any) -> int:
    """-1 for a pod that is none."""
    index = _index(pod)
    if index is None:
        return -1
    first, _, pods = annotation(pod, names.RANKS).partition("/")
    if not (first.isdigit() and pods.isdigit()):
        return index
    replica = label(pod, _JOB_INDEX)
    return int(first) + int(pods) * (int(replica) if replica.isdigit() else 0) + index


def _index(pod: Any) -> int | None:
    index = label(pod, names.COMPLETION_INDEX) or annotation(pod, names.COMPLETION_INDEX)
    return int(index) if index.isascii() and index.isdigit() else None
