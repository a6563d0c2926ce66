"""What Trainer, the webhook and the controller write about one job, written by a test: the plugin reads no more."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightkube import Client
from lightkube.resources.core_v1 import Event, Pod, PodStatus
from lightkube.types import PatchType
from tests.kube.objects import jobset, trainjob

from stasis.api import names
from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.kube.client import Checkpoints, JobSets, TrainJobs, meta

NOW = "2026-11-30T20:00:00Z"


class Job:
    """A TrainJob `gpt` of two ranks, with its JobSet."""

    def __init__(self, client: Client, namespace: str, *, label: str | None = "default", **spec: Any) -> None:
        self.client, self.namespace, self.name = client, namespace, "gpt"
        self.uid = str(meta(client.create(trainjob(self.name, namespace, label=label, **spec)))["uid"])
        client.create(jobset(self.name, namespace, suspend=bool(spec.get("suspend")), label=label))

    def get(self) -> Any:
        return self.client.get(TrainJobs, self.name, namespace=self.namespace)

    def annotate(self, **annotations: str | None) -> None:
        self._patch(TrainJobs, self.name, {"metadata": {"annotations": annotations}})

    def jobset(self, *, suspend: bool, gate: str = "") -> None:
        change = {"metadata": {"annotations": {names.GATE: gate}}, "spec": {"suspend": suspend}}
        self._patch(JobSets, self.name, change)

    def pods(self, phase: str = "Running", **annotations: str) -> None:
        for rank in (0, 1):
            notes = {names.COMPLETION_INDEX: str(rank), names.PREPARED: "abc", names.CONTAINER: "node", **annotations}
            name = f"{self.name}-node-0-{rank}-x{len(annotations)}"
            labels = {names.JOBSET_NAME_LABEL: self.name}
            spec: dict[str, Any] = {"nodeName": f"worker-{rank}", "containers": [{"name": "node", "image": "i"}]}
            spec["terminationGracePeriodSeconds"] = 0
            body = {"metadata": {"name": name, "namespace": self.namespace, "labels": labels, "annotations": notes}}
            self.client.create(Pod.from_dict({**body, "spec": spec}))
            status = {
                "status": {"phase": phase, "podIP": f"10.0.0.{rank + 1}", "podIPs": [{"ip": f"10.0.0.{rank + 1}"}]}
            }
            self._patch(PodStatus, name, status)

    def no_pods(self) -> None:
        for pod in self.client.list(Pod, namespace=self.namespace):
            assert pod.metadata is not None
            self.client.delete(Pod, str(pod.metadata.name), namespace=self.namespace, grace_period=0)

    def checkpoint(self, name: str, *, kind: str = "Suspend", uid: str = "", **status: Any) -> str:
        """Its UID."""
        uid = uid or self.uid
        body = {
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": TrainJobCheckpoint.labels_for(self.name, uid),
            },
            "spec": {"trainJob": {"name": self.name, "uid": uid}, "kind": kind},
        }
        made = self.client.create(Checkpoints.from_dict(body))
        self.status(name, **status)
        return str(meta(made)["uid"])

    def status(self, name: str, *conditions: dict[str, str], **status: Any) -> None:
        if conditions:
            status["conditions"] = list(conditions)
        self._patch(Checkpoints.Status, name, {"status": status})

    def event(self, name: str, reason: str, message: str, **annotations: str) -> None:
        about = {"kind": "TrainJob", "name": self.name, "namespace": self.namespace, "uid": self.uid}
        metadata = {"name": name, "namespace": self.namespace, "annotations": annotations}
        body = {"metadata": metadata, "involvedObject": about, "reason": reason, "message": message}
        self.client.create(Event.from_dict({**body, "type": "Warning", "lastTimestamp": NOW, "count": 1}))

    def _patch(self, kind: Any, name: str, change: dict[str, Any]) -> None:
        self.client.patch(kind, name, change, namespace=self.namespace, patch_type=PatchType.MERGE)


def condition(kind: str, status: str = "True", reason: str = "Done", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW}


RELEASED = [condition("Complete"), condition("Durable"), condition("Released")]


def operation(op: str, kind: str, serial: int = 1, outcome: str = "") -> dict[str, Any]:
    return {"op": op, "kind": kind, "serial": serial, "spec": json.dumps({}), "outcome": outcome}


@contextmanager
def meanwhile(*steps: Callable[[], object]) -> Iterator[None]:
    """Each step in turn, as soon as the one before it is through and this one does not return False."""
    failed: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            for step in steps:
                while step() is False and not over.is_set():
                    time.sleep(0.05)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
