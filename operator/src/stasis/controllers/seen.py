"""What the watches have told: small copies of what matters, to see for which TrainJobs there is something to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicySpec
from stasis.controllers.description import Description
from stasis.controllers.observe import (
    checkpoint_of,
    holds,
    job_of,
    jobset_of,
    pod_of,
    policy_name,
    policy_of,
    unready_since,
)
from stasis.core.decide import stored
from stasis.core.retention import Stored
from stasis.core.view import Checkpoint, Job, JobSet, Pod, View
from stasis.kube.client import label, meta
from stasis.kube.ranks import is_rank

Key = tuple[str, str]  # namespace, name of the TrainJob


class Seen:
    """`changed(key)` is called when something of a TrainJob is no longer as it was."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._jobs: dict[Key, Job] = {}
        self._jobsets: dict[Key, JobSet] = {}
        self._policy_names: dict[Key, str] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._checkpoints: dict[Key, dict[str, Checkpoint]] = {}
        self._policies: dict[Key, CheckpointPolicySpec] = {}
        self._asked: dict[Key, float] = {}  # when it was first seen that a job is to be suspended
        self._answered: dict[Key, str] = {}  # the last preflight that was
        self._refused: dict[Key, str] = {}  # why a choice was, that is still there
        self._told: set[str] = set()  # UIDs of placeholders that were told to run, and of such TrainJobs
        self.nodes: dict[str, str] = {}  # name -> address
        self._unready: dict[str, float] = {}  # nodes that are not ready, and since when
        self._said: dict[Key, set[str]] = {}  # what the user of a TrainJob was told
        self.heard_at = time.monotonic()

    # ------------------------------------------------------------ told by the watches

    def trainjob(self, obj: Any, deleted: bool) -> None:
        key = _key(obj)
        if deleted:
            self._asked.pop(key, None)
            self._answered.pop(key, None)
            self._said.pop(key, None)
            self._told.discard(meta(obj)["uid"])
            self._replace(self._jobs, key, None)
        else:
            self._replace(self._jobs, key, self.job(key, obj))
        if deleted or self._jobs[key].choice is None:
            self._refused.pop(key, None)

    def jobset(self, obj: Any, deleted: bool) -> None:
        key, enabled = _key(obj), bool(label(obj, names.POLICY_LABEL))
        self._replace(self._policy_names, key, label(obj, names.POLICY_LABEL) if enabled and not deleted else None)
        self._replace(self._jobsets, key, jobset_of(obj) if enabled and not deleted else None)

    def pod(self, obj: Any, deleted: bool) -> None:
        name, uid = label(obj, names.JOBSET_NAME_LABEL), meta(obj)["uid"]
        if deleted:
            self._told.discard(uid)
            for key in [key for key, pods in self._pods.items() if uid in pods and key[0] == meta(obj)["namespace"]]:
                del self._pods[key][uid]
                if not self._pods[key]:
                    del self._pods[key]
                self._changed(key)
        elif name and is_rank(obj):
            key = (meta(obj)["namespace"], name)
            self._replace(self._pods.setdefault(key, {}), uid, self.pod_now(obj), key)

    def checkpoint(self, obj: Any, deleted: bool) -> None:
        key = (meta(obj)["namespace"], obj["spec"]["trainJob"]["name"])
        known = self._checkpoints.setdefault(key, {})
        self._replace(known, meta(obj)["name"], None if deleted else checkpoint_of(obj, pods_of(obj)), key)
        if not known:
            del self._checkpoints[key]

    def policy(self, obj: Any, deleted: bool) -> None:
        key = _key(obj)
        spec = None if deleted else CheckpointPolicySpec.from_dict(obj.get("spec") or {})
        if self._policies.get(key) == spec:
            return
        if spec is None:
            self._policies.pop(key, None)
        else:
            self._policies[key] = spec
        for job, name in self._policy_names.items():
            if (job[0], name) == key:
                self._changed(job)

    def node(self, obj: Any, deleted: bool) -> None:
        name = meta(obj)["name"]
        addresses = (obj.get("status") or {}).get("addresses") or ()
        address = next((str(a["address"]) for a in addresses if a["type"] == "InternalIP"), None)
        if deleted or address is None:
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = address
        since = 0.0 if deleted else unready_since(obj)
        if since == self._unready.get(name, 0.0):
            return
        if since:
            self._unready[name] = since
        else:
            del self._unready[name]
        for key, pods in self._pods.items():
            if here := {uid: replace(pod, unready_since=since) for uid, pod in pods.items() if pod.node == name}:
                pods.update(here)
                self._changed(key)

    def _replace(self, table: dict[Any, Any], index: Any, new: Any, key: Key | None = None) -> None:
        self.heard_at = time.monotonic()
        if table.get(index) == new:
            return
        if new is None:
            del table[index]
        else:
            table[index] = new
        self._changed(key or index)

    def forget_gone(self, key: Key, before: View, now: View) -> None:
        """What was known `before` the API server was asked, and is not there `now`: a watch that began anew may have
        missed its end. What was told since is newer than the answer, and stays."""
        if now.job is None and before.job is not None and self._jobs.get(key) is before.job:
            self._replace(self._jobs, key, None)
        if now.jobset is None and before.jobset is not None and self._jobsets.get(key) is before.jobset:
            self._replace(self._jobsets, key, None)
            self._policy_names.pop(key, None)
        known, there = self._checkpoints.get(key, {}), {checkpoint.name for checkpoint in now.checkpoints}
        for checkpoint in before.checkpoints:
            if checkpoint.name not in there and known.get(checkpoint.name) is checkpoint:
                self._replace(known, checkpoint.name, None, key)
        if not known:
            self._checkpoints.pop(key, None)

    # ------------------------------------------------------------ what is known

    def job(self, key: Key, obj: Any) -> Job:
        """The TrainJob as it is given; since when it is to be suspended may be ours alone to know."""
        if not (obj.get("spec") or {}).get("suspend") or holds(obj, "Suspended"):
            self._asked.pop(key, None)
            job = job_of(obj, time.time())
        else:
            job = job_of(obj, self._asked.setdefault(key, time.time()))
        answered = job.check == self._answered.get(key)
        return replace(job, check="" if answered else job.check, told=job.uid in self._told)

    def answer(self, key: Key, nonce: str) -> None:
        """The preflight of this name was answered."""
        self._answered[key] = nonce
        if (job := self._jobs.get(key)) is not None and job.check == nonce:
            self._jobs[key] = replace(job, check="")

    def refuses(self, key: Key, cause: str) -> bool:
        """Whether a choice is refused for a cause for the first time; not where it has been withdrawn meanwhile."""
        job = self._jobs.get(key)
        again = job is None or job.choice is None or self._refused.get(key) == cause
        if again:
            return False
        self._refused[key] = cause
        return True

    def says(self, key: Key, text: str) -> bool:
        """Whether the user of a TrainJob is told this for the first time."""
        said = self._said.setdefault(key, set())
        first = text not in said
        said.add(text)
        return first

    def pod_now(self, obj: Any) -> Pod:
        """As it is given, with what its own object does not tell."""
        pod = pod_of(obj, meta(obj)["uid"] in self._told)
        return replace(pod, unready_since=self._unready.get(pod.node, 0.0))

    def tell(self, uid: str) -> None:
        """The placeholder was told to run; the user of a TrainJob was told of its namesakes."""
        self._told.add(uid)

    def tell_of_namesakes(self, key: Key) -> None:
        if (job := self._jobs.get(key)) is not None:
            self._told.add(job.uid)
            self._jobs[key] = replace(job, told=True)

    def policy_of(self, namespace: str, name: str) -> CheckpointPolicySpec:
        """The defaults where there is no object of the name."""
        return self._policies.get((namespace, name)) or CheckpointPolicySpec()

    def checkpoint_names(self, key: Key) -> set[str]:
        return set(self._checkpoints.get(key, ()))

    def keys(self) -> set[Key]:
        return {*self._jobsets, *self._checkpoints, *(key for key, job in self._jobs.items() if job.check)}

    def count(self) -> tuple[int, int]:
        """Enabled jobs, and pods of their ranks."""
        both = [key for key in self._jobsets if key in self._jobs]
        return len(both), sum(len(self._pods.get(key, ())) for key in both)

    def stored(self, namespace: str) -> list[Stored]:
        """All checkpoints of a namespace."""
        keys = [key for key in self._checkpoints if key[0] == namespace]
        return [one for key in keys for one in stored(self.view(key))]

    def deferred(self) -> list[tuple[Key, float]]:
        """Jobs whose suspend is held back, and since when in seconds of the wall clock."""
        return [
            (key, job.since)
            for key, job in self._jobs.items()
            if job.suspend
            and not job.finished
            and (jobset := self._jobsets.get(key)) is not None
            and not jobset.suspend
        ]

    def not_durable(self) -> list[tuple[Key, float]]:
        """Jobs whose last checkpoint is on its nodes alone, and since when in seconds of the wall clock."""
        last = [(key, in_order(known.values())[-1]) for key, known in self._checkpoints.items()]
        return [(key, checkpoint.completed_at) for key, checkpoint in last if checkpoint.local]

    def view(self, key: Key) -> View:
        checkpoints = in_order(self._checkpoints.get(key, {}).values())
        policy = self.policy_of(key[0], policy_name(self._policy_names.get(key, ""), checkpoints))
        return View(
            now=time.time(),
            job=self._jobs.get(key),
            jobset=self._jobsets.get(key),
            pods=tuple(self._pods.get(key, {}).values()),
            checkpoints=checkpoints,
            policy=policy_of(policy),
        )


def pods_of(checkpoint: Any) -> dict[str, dict[int, str]]:
    """By operation of a TrainJobCheckpoint: rank -> UID of its pod."""
    operations = (checkpoint.get("status") or {}).get("operations") or ()
    return {entry["op"]: Description.from_json(entry["spec"]).pods for entry in operations}


def in_order(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """By their serials; those that have none yet last."""
    return tuple(sorted(checkpoints, key=lambda c: (c.serial == 0, c.serial, c.name)))


def _key(obj: Any) -> Key:
    return meta(obj)["namespace"], meta(obj)["name"]
