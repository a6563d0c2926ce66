"""What a user has before them: kubectl, a TrainJob, its pods' logs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stasis.demo.proof import differences, steps

RANK = "batch.kubernetes.io/job-completion-index"
WORKERS = ("stasis-e2e-worker", "stasis-e2e-worker2")
TRAIN = Path(__file__).parents[1] / "operator/src/stasis/demo/train.py"


class Cluster:
    """`environment`: that of e2e/cluster/env.sh, which has the cluster's programs, Docker and kubeconfig."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.registry = environment["STASIS_E2E_REGISTRY"]

    def stasis(self, *args: str) -> str:
        return self.kubectl("stasis", *args)

    def run(self, *command: str, stdin: str | None = None, check: bool = True, timeout: float = 300) -> str:
        """What it prints; a failure is an AssertionError with all that it said."""
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=self.environment, timeout=timeout
        )
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        return self.run("kubectl", *args, stdin=stdin, check=check)

    def get(self, *args: str) -> Any:
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def items(self, *args: str) -> list[Any]:
        items: list[Any] = self.get(*args)["items"]
        return items

    def apply(self, *objects: Any) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def wait(self, what: str, condition: Callable[[], Any], timeout: float = 180) -> Any:
        """What the condition tells when it first holds; a time-out says what was waited for, and all that happened."""
        end = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < end, f"{what}: not within {timeout:g} s\n{self.story()}"
            time.sleep(0.5)
        return found

    def signal(self, node: str, pattern: str, signal: str = "KILL") -> bool:
        """To the processes on a node whose command line matches, as the node sees them; whether there were any."""
        command = ("docker", "exec", node, "pkill", f"-{signal}", "-f", "--", pattern)
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        assert done.returncode in (0, 1), done.stderr  # 1: there was none
        return done.returncode == 0

    @contextlib.contextmanager
    def only_on(self, *nodes: str) -> Iterator[None]:
        """New pods go to these nodes only."""
        others = [n["metadata"]["name"] for n in self.items("nodes") if n["metadata"]["name"] not in nodes]
        self.kubectl("cordon", *others)
        try:
            yield
        finally:
            self.kubectl("uncordon", *others)

    def story(self) -> str:
        """For a failed test: what a person would look at."""
        asked = (
            ("get", "trainjobs,jobsets,pods,trainjobcheckpoints", "-A", "-o", "wide"),
            ("get", "events", "-A", "--sort-by=.lastTimestamp"),
            ("logs", "-n", "stasis-system", "-l", "app.kubernetes.io/component=controller", "--tail=60", "--prefix"),
            ("logs", "-n", "stasis-system", "-l", "app.kubernetes.io/component=agent", "--tail=60", "--prefix"),
        )
        return "\n".join(f"--- kubectl {' '.join(args)}\n{self.kubectl(*args, check=False)}" for args in asked)


@dataclass
class Pod:
    """One incarnation of a rank."""

    name: str
    uid: str
    node: str
    address: str
    rank: int


@dataclass
class Job:
    """A TrainJob that runs the demo's training script, and the logs of all its pods."""

    cluster: Cluster
    name: str
    namespace: str
    steps: int = 100
    pause: float = 0.2
    ranks: int = 2
    policy: str = "default"
    spread: bool = True  # a node each
    patch: dict[str, Any] = field(default_factory=dict)  # of the pod template's spec, in the runtime
    volumes: Sequence[Any] = ()
    mounts: Sequence[Any] = ()
    script: str = TRAIN.read_text()  # what torchrun runs
    image: str = ""  # the training image
    before: str = ""  # a command of an initializer, which has to end well before the ranks begin
    _logs: dict[int, bytes] = field(default_factory=dict)
    _followed: dict[str, threading.Thread] = field(default_factory=dict)

    def create(self) -> None:
        self.cluster.apply(*self.objects())

    def objects(self) -> list[Any]:
        """The script, the runtime and the TrainJob."""
        meta = {"namespace": self.namespace, "name": self.name}
        script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"train.py": self.script}}
        labels = {"stasis.dev/policy": self.policy} if self.policy else {}
        command = ["torchrun", "/code/train.py", f"--steps={self.steps}", f"--pause={self.pause}"]
        job = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {**meta, "labels": labels},
            "spec": {
                "runtimeRef": {"kind": "TrainingRuntime", "name": self.name},
                "trainer": {"numNodes": self.ranks, "numProcPerNode": 1, "command": command},
            },
        }
        return [script, self._runtime(), job]

    def _runtime(self) -> dict[str, Any]:
        spread = {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": self.name}},
                    }
                ]
            }
        }
        image = f"{self.cluster.registry}/stasis-trainer:e2e"
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            **({"affinity": spread} if self.spread else {}),
            "containers": [
                {
                    "name": "node",
                    "image": self.image or image,
                    "volumeMounts": [{"name": "code", "mountPath": "/code"}, *self.mounts],
                },
            ],
            "volumes": [{"name": "code", "configMap": {"name": self.name}}, *self.volumes],
            **self.patch,
        }
        jobs = [_replicated("node", "trainer", pod)]
        if self.before:
            name = "dataset-initializer"
            container = {"name": name, "image": image, "command": ["sh", "-c", self.before]}
            jobs[0]["dependsOn"] = [{"name": name, "status": "Complete"}]
            jobs.insert(0, _replicated(name, name, {"restartPolicy": "Never", "containers": [container]}))
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": {
                "namespace": self.namespace,
                "name": self.name,
                "labels": {"trainer.kubeflow.org/framework": "torch"},
            },
            "spec": {
                "mlPolicy": {"numNodes": self.ranks, "torch": {}},
                "template": {"spec": {"replicatedJobs": jobs}},
            },
        }

    # What the user does.

    def patch_suspend(self, suspend: bool) -> None:
        change = json.dumps({"spec": {"suspend": suspend}})
        self.cluster.kubectl("-n", self.namespace, "patch", "trainjob", self.name, "--type=merge", "-p", change)

    def suspend(self, timeout: float = 180) -> Any:
        """Returns the checkpoint that it made, once all pods are gone."""
        known = {found["metadata"]["uid"] for found in self.checkpoints()}
        self.patch_suspend(True)
        self.wait_for_no_pods(timeout)

        def made() -> Any:
            return next((c for c in self.checkpoints() if c["metadata"]["uid"] not in known and done(c)), None)

        def done(checkpoint: Any) -> bool:
            return condition(checkpoint, "Complete") == "True" and condition(checkpoint, "Released") == "True"

        return self.cluster.wait(f"{self.name} has a new checkpoint", made, 60)

    def wait_for_no_pods(self, timeout: float = 180) -> None:
        self.cluster.wait(f"{self.name} has no pods", lambda: not self.all_pods(), timeout)

    def addresses(self) -> dict[int, str]:
        return {rank: pod.address for rank, pod in self.pods().items()}

    def resume(self, timeout: float = 180) -> None:
        """Returns once training goes on, a step beyond the last one known."""
        before = self.last_steps()
        self.patch_suspend(False)
        self.wait_to_go_on(before, timeout)

    def wait_to_go_on(self, before: Mapping[int, int], timeout: float = 180) -> None:
        """Until every rank has made a step after these."""
        self.cluster.wait(
            f"{self.name} goes on after step {before}",
            lambda: self.follow() and all(self.last_step(rank) > step for rank, step in before.items()),
            timeout,
        )

    # What the user sees.

    def told(self, reason: str, timeout: float = 90) -> str:
        """The event of this reason, once there is one."""

        def found() -> str:
            return next((event for event in self.events() if event.startswith(f"{reason}: ")), "")

        told: str = self.cluster.wait(f"{self.name} is told {reason}", found, timeout)
        return told

    def checkpoints(self) -> list[Any]:
        return self.cluster.items("-n", self.namespace, "trainjobcheckpoints", "-l", f"stasis.dev/trainjob={self.name}")

    def all_pods(self) -> list[Any]:
        return self.cluster.items("-n", self.namespace, "pods", "-l", f"jobset.sigs.k8s.io/jobset-name={self.name}")

    def pods(self) -> dict[int, Pod]:
        """Those that run, by rank."""
        found = {}
        for pod in self.all_pods():
            meta, status = pod["metadata"], pod["status"]
            if status.get("phase") == "Running" and "deletionTimestamp" not in meta:
                rank = int(meta["labels"][RANK])
                found[rank] = Pod(meta["name"], meta["uid"], pod["spec"]["nodeName"], status.get("podIP", ""), rank)
        return found

    def follow(self) -> bool:
        """Follow the log of every pod that runs; whether all ranks' pods do."""
        pods = self.pods()
        for pod in pods.values():
            if pod.uid not in self._followed:
                thread = threading.Thread(target=self._read, args=(pod,), daemon=True)
                self._followed[pod.uid] = thread
                thread.start()
        return len(pods) == self.ranks

    def _read(self, pod: Pod) -> None:
        command = ["kubectl", "-n", self.namespace, "logs", "-f", pod.name, "-c", "node"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.cluster.environment
        ) as reading:
            assert reading.stdout
            while data := os.read(reading.stdout.fileno(), 65536):
                self._logs[pod.rank] = self._logs.get(pod.rank, b"") + data

    def lines(self, rank: int) -> list[str]:
        return self._logs.get(rank, b"").decode(errors="replace").splitlines()

    def last_step(self, rank: int) -> int:
        steps = [int(line.split()[1]) for line in self.lines(rank) if line.startswith("step ") and " pid " in line]
        return steps[-1] if steps else -1

    def last_steps(self) -> dict[int, int]:
        return {rank: self.last_step(rank) for rank in range(self.ranks)}

    def wait_for_step(self, step: int, timeout: float = 180) -> None:
        self.cluster.wait(
            f"{self.name} reaches step {step}",
            lambda: self.follow() and all(self.last_step(rank) >= step for rank in range(self.ranks)),
            timeout,
        )

    def beginnings(self) -> int:
        """How often the training has begun."""
        return sum(line.startswith("step 0 ") for line in self.lines(0))

    def wait_for_beginnings(self, count: int) -> None:
        text = f"{self.name} begins for the {count}. time"
        self.cluster.wait(text, lambda: self.follow() and self.beginnings() >= count)

    def wait_for_end(self, timeout: float = 300) -> None:
        self.cluster.wait(
            f"{self.name} is complete",
            lambda: self.follow() is None or condition(self.get(), "Complete") == "True",
            timeout,
        )
        for thread in self._followed.values():
            thread.join(20)

    def get(self) -> Any:
        return self.cluster.get("-n", self.namespace, "trainjob", self.name)

    def events(self) -> list[str]:
        """Reason and message of what the user is told with the TrainJob."""
        found = self.cluster.items("-n", self.namespace, "events")
        return [
            f"{event['reason']}: {event.get('message', '')}"
            for event in found
            if event["involvedObject"]["kind"] == "TrainJob" and event["involvedObject"]["name"] == self.name
        ]

    def delete(self) -> None:
        for kind in ("trainjob", "trainingruntime", "configmap"):
            self.cluster.kubectl(
                "-n", self.namespace, "delete", kind, self.name, "--ignore-not-found", "--wait=true", check=False
            )
        self.cluster.kubectl(
            "-n", self.namespace, "delete", "pods", "-l", f"jobset.sigs.k8s.io/jobset-name={self.name}", check=False
        )


def _replicated(name: str, step: str, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": step}},
            "spec": {"podReplacementPolicy": "Failed", "template": {"spec": pod}},
        },
    }


STEPS = 60  # of a run that is compared with an undisturbed one


def finish(job: Job, undisturbed: Mapping[int, Sequence[str]]) -> None:
    """Let it train to its end, and see that nothing of its training was lost or repeated."""
    job.wait_for_end()
    assert differences({rank: job.lines(rank) for rank in range(job.ranks)}, undisturbed) == []


def went_back(job: Job, read: Mapping[int, int], undisturbed: Mapping[int, Sequence[str]]) -> None:
    """What came after the first `read` lines follows a checkpoint that is older than they."""
    for rank in range(job.ranks):
        lines = job.lines(rank)
        again = steps(lines[read[rank] :])[0].number
        assert 0 < again <= steps(lines[: read[rank]])[-1].number
        kept = [line for line in lines[: read[rank]] if any(s.number < again for s in steps([line]))]
        assert differences({rank: kept + lines[read[rank] :]}, {rank: undisturbed[rank]}) == []


def condition(found: Any, kind: str) -> str:
    """The status of a condition, "" where there is none."""
    conditions: Sequence[Any] = found.get("status", {}).get("conditions", [])
    return next((str(one["status"]) for one in conditions if one["type"] == kind), "")


@contextlib.contextmanager
def training(cluster: Cluster, name: str, namespace: str, **options: Any) -> Iterator[Job]:
    job = Job(cluster, name, namespace, **options)
    try:
        job.create()
        yield job
    finally:
        job.delete()
