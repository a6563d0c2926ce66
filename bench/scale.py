"""`make scale`: the controller beside many TrainJobs, in a real API server. Nothing else runs: the objects are written
directly, and what is measured is our controller's process alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from lightkube import AsyncClient
from lightkube.config.kubeconfig import KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace, Pod
from lightkube.types import PatchType
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.support.apiserver import ApiServer, define_training, free_port, serving

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicySpec
from stasis.api.v1alpha1.trainjobcheckpoint import HOLD_FINALIZER, CheckpointKind, ConditionType, TrainJobCheckpoint
from stasis.controllers import status
from stasis.controllers.description import describe
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Record, Verdict
from stasis.kube.client import Checkpoints, JobSets, Pods, TrainJobs, meta
from stasis.presentation import output

NAMESPACES = 20
AT_ONCE = 16  # requests
PATIENCE = 600.0  # seconds until all must be known
IDLE = 60.0  # seconds


@dataclass(frozen=True)
class Goal:
    name: str
    limit: float | None  # None: told, but no goal
    unit: str
    found: float

    @property
    def reached(self) -> bool:
        return self.limit is None or self.found <= self.limit


def objects(number: int, ranks: int) -> Iterator[Any]:
    """One training that runs, as Trainer, JobSet and the Job controller write it."""
    name, namespace = f"job-{number}", f"scale-{number % NAMESPACES}"
    label = {names.POLICY_LABEL: "default"}
    about = {"name": name, "namespace": namespace, "labels": label}
    spec = {"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": ranks, "command": ["torchrun", "train.py"]}}
    yield TrainJobs.from_dict({"metadata": about, "spec": spec})
    pod = {"spec": {"restartPolicy": "Never", "containers": [container()]}}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": pod, "parallelism": ranks, "completions": ranks},
        },
    }
    yield JobSets.from_dict({"metadata": about, "spec": {"suspend": False, "replicatedJobs": [node]}})
    for rank in range(ranks):
        labels = {
            **label,
            names.JOBSET_NAME_LABEL: name,
            "jobset.sigs.k8s.io/replicatedjob-name": "node",
            "trainer.kubeflow.org/trainjob-ancestor-step": "trainer",
            "batch.kubernetes.io/job-completion-index": str(rank),
        }
        marks = {names.PREPARED: "0123456789ab", names.ID: f"{number:08x}{rank:08x}", names.CONTAINER: "node"}
        where = {"name": f"{name}-node-0-{rank}", "namespace": namespace, "labels": labels, "annotations": marks}
        yield Pods.from_dict(
            {
                "metadata": where,
                "spec": {"nodeName": f"node-{number % 500}", "containers": [container()]},
            }
        )


def container() -> dict[str, Any]:
    env = [{"name": f"VARIABLE_{number}", "value": "of a usual length"} for number in range(20)]
    return {"name": "node", "image": "registry.example/team/trainer:1", "command": ["torchrun", "train.py"], "env": env}


RUNS = {
    "status": {
        "phase": "Running",
        "podIP": "10.1.2.3",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {
                "name": "node", "ready": True, "restartCount": 0, "image": "i", "imageID": "i@sha256:0",
                "containerID": "containerd://" + "0" * 64, "state": {"running": {}},
            }
        ],
    }
}  # fmt: skip


def saved(checkpoint: Any, pods: list[Any]) -> dict[str, Any]:
    """The status of a checkpoint that these pods were suspended in and have come back from."""
    digest = "sha256:" + "0123456789abcdef" * 4
    facts: dict[str, Any] = {
        "known": {},
        "manifests": {},
        "world_size": len(pods),
        "repository": "registry.example/stasis",
    }
    description = describe(checkpoint, Kind.RELEASE, 1, pods, policy=CheckpointPolicySpec(), **facts)
    op, ranks = description.spec.op, description.spec.ranks
    found = status.begun(checkpoint, description, pods, serial=1, worldSize=len(pods), policy="default", tag="1")
    ends = (
        Record(Verdict.COMMIT, op, 1, 1, ranks, manifests=dict.fromkeys(ranks, digest)),
        Record(Verdict.RELEASE, op, 1, 1, ranks),
        Record(Verdict.ENDED, op, 1, 1, ranks, outcome=str(Outcome.RELEASED)),
    )
    found["operations"][0]["records"] = [
        {"key": f"{op}/{r.verdict}", "verdict": str(r.verdict), "epoch": 1, "record": json.dumps(r.to_dict())}
        for r in ends
    ]
    found |= status.concluded({**checkpoint, "status": found}, op, {}, 1)
    done = {"status": found}
    found["conditions"] = status.with_condition(done, ConditionType.RESTORED, True, "Restored", "", 1)
    return found


async def fill(client: AsyncClient, jobs: int, ranks: int, progress: Progress) -> None:
    task = progress.add_task("writing TrainJobs, JobSets, pods and checkpoints", total=jobs)
    numbers = iter(range(jobs))

    async def write() -> None:
        for number in numbers:
            job: Any = None
            pods = []
            for obj in objects(number, ranks):
                made = await client.create(obj)
                job = job or made
                if isinstance(obj, Pods):
                    name, namespace = meta(obj)["name"], meta(obj)["namespace"]
                    await client.patch(Pod.Status, name, RUNS, namespace=namespace, patch_type=PatchType.MERGE)
                    pods.append({**made, **RUNS})
            about = meta(job)
            name, namespace = f"{about['name']}-1", about["namespace"]
            labels = TrainJobCheckpoint.labels_for(about["name"], about["uid"])
            spec = {"trainJob": {"name": about["name"], "uid": about["uid"]}, "kind": str(CheckpointKind.SUSPEND)}
            where = {"name": name, "namespace": namespace, "labels": labels, "finalizers": [HOLD_FINALIZER]}
            checkpoint = await client.create(Checkpoints.from_dict({"metadata": where, "spec": spec}))
            change = {"status": saved(checkpoint, pods)}
            await client.patch(Checkpoints.Status, name, change, namespace=namespace, patch_type=PatchType.MERGE)
            progress.advance(task)

    await asyncio.gather(*(write() for _ in range(AT_ONCE)))


async def versions(client: AsyncClient) -> dict[str, str]:
    """UID -> resourceVersion of all that there is."""
    found = {}
    for kind in (TrainJobs, JobSets, Pods, Checkpoints):
        async for obj in client.list(kind, namespace="*", chunk_size=500):
            found[meta(obj)["uid"]] = str(meta(obj)["resourceVersion"])
    return found


class Controller:
    """One process of the controller, which leads."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self._port = free_port()
        options = {
            "--repository": f"oci:{folder}/store",
            "--namespace": "scale-0",
            "--http-port": self._port,
            "--kubeconfig": api.kubeconfig,
        }
        words = [str(word) for pair in options.items() for word in pair]
        self.started = time.monotonic()
        with open(folder / "controller.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stasis.controllers", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}

    def wait(self, jobs: int, pods: int, tell: Callable[[float, float], None]) -> float:
        """Seconds from its start until all is known and looked at."""
        while time.monotonic() - self.started < PATIENCE:
            if self.process.poll() is not None:
                raise click.ClickException("the controller has ended")
            try:
                found = self.metrics()
            except OSError:
                found = {}
            known, there = found.get("stasis_trainjobs", 0), found.get("stasis_pods", 0)
            tell(known, there)
            if (known, there) == (jobs, pods) and not found["stasis_queue_length"] and found["stasis_leader"]:
                return time.monotonic() - self.started
            time.sleep(0.2)
        raise click.ClickException(f"after {PATIENCE:g} s it knows {known:g} TrainJobs and {there:g} pods")

    def cpu(self) -> float:
        """Seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> float:
        """MB, at its peak."""
        told = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"^VmHWM:\s+(\d+) kB$", told, re.MULTILINE)[0]) * 1024 / 1e6

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def served(folder: Path) -> Iterator[ApiServer]:
    with serving(folder / "api") as api:
        client = api.client()
        define_training(client)
        for number in range(NAMESPACES):
            client.create(Namespace(metadata=ObjectMeta(name=f"scale-{number}")))
        yield api


def measure(jobs: int, ranks: int, console: Console) -> list[Goal]:
    with tempfile.TemporaryDirectory(prefix="stasis-scale-") as name, served(Path(name)) as api:

        async def filled(progress: Progress) -> dict[str, str]:
            client = AsyncClient(KubeConfig.from_file(api.kubeconfig).get())
            await fill(client, jobs, ranks, progress)
            return await versions(client)

        async def look() -> dict[str, str]:
            return await versions(AsyncClient(KubeConfig.from_file(api.kubeconfig).get()))

        with Progress(console=console) as progress:
            before = asyncio.run(filled(progress))
            task = progress.add_task("the controller learns of them", total=jobs + jobs * ranks)
            controller = Controller(api, Path(name))
            try:
                ready = controller.wait(
                    jobs, jobs * ranks, lambda known, there: progress.update(task, completed=known + there)
                )
                used = controller.cpu()
                time.sleep(5)  # what it does right after
                task = progress.add_task("the controller is idle", total=IDLE)
                start, since = controller.cpu(), time.monotonic()
                while (passed := time.monotonic() - since) < IDLE:
                    progress.update(task, completed=passed)
                    time.sleep(1)
                share, peak = 100 * (controller.cpu() - start) / passed, controller.resident()
            finally:
                controller.close()
        after = asyncio.run(look())
        written = sum(after.get(uid) != version for uid, version in before.items()) + len(after.keys() - before.keys())
        return [
            Goal("ready after", 60, "s", round(ready, 1)),
            Goal("CPU time until then", None, "s", round(used, 1)),
            Goal("resident memory, peak", 300, "MB", round(peak)),
            Goal("of a core when idle", 2, "%", round(share, 2)),
            Goal("writes while nothing is asked for", 0, "", written),
        ]


@click.command(context_settings={"show_default": True})
@click.option("--jobs", default=5000, help="TrainJobs")
@click.option("--ranks", default=4, help="pods of each")
@click.option("-o", "form", type=click.Choice(["json"]), help="instead of a table")
def main(jobs: int, ranks: int, form: str | None) -> None:
    """Measure the controller beside many TrainJobs; exits with 1 where a goal is missed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # takes the API server along
    goals = measure(jobs, ranks, Console(stderr=True, highlight=False))
    if form:
        click.echo(json.dumps([{**asdict(goal), "reached": goal.reached} for goal in goals], indent=2))
    else:
        table = Table("", "found", "goal", title=f"{jobs} TrainJobs with a checkpoint each, {jobs * ranks} pods")
        for goal in goals:
            colour = "green" if goal.reached else "red"
            table.add_row(
                goal.name,
                f"[{colour}]{goal.found:g} {goal.unit}[/]",
                "" if goal.limit is None else f"{goal.limit:g} {goal.unit}",
            )
        output().print(table)
    sys.exit(0 if all(goal.reached for goal in goals) else 1)


if __name__ == "__main__":
    main()
