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
from stasis.kube.client import JobSets, Pods, TrainJobs, meta
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


async def fill(client: AsyncClient, jobs: int, ranks: int, progress: Progress) -> None:
    task = progress.add_task("writing TrainJobs, JobSets and pods", total=jobs)
    numbers = iter(range(jobs))

    async def write() -> None:
        for number in numbers:
            for obj in objects(number, ranks):
                await client.create(obj)
                if isinstance(obj, Pods):
                    name, namespace = meta(obj)["name"], meta(obj)["namespace"]
                    await client.patch(Pod.Status, name, RUNS, namespace=namespace, patch_type=PatchType.MERGE)
            progress.advance(task)

    await asyncio.gather(*(write() for _ in range(AT_ONCE)))


async def versions(client: AsyncClient) -> dict[str, str]:
    """UID -> resourceVersion of all that is not ours."""
    found = {}
    for kind in (TrainJobs, JobSets, Pods):
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
        """MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

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
                used, peak = controller.cpu(), controller.resident()
                time.sleep(5)  # what it does right after
                task = progress.add_task("the controller is idle", total=IDLE)
                start, since = controller.cpu(), time.monotonic()
                while (passed := time.monotonic() - since) < IDLE:
                    progress.update(task, completed=passed)
                    peak = max(peak, controller.resident())
                    time.sleep(1)
                share = 100 * (controller.cpu() - start) / passed
            finally:
                controller.close()
        after = asyncio.run(look())
        written = sum(after.get(uid) != version for uid, version in before.items()) + len(after.keys() - before.keys())
        return [
            Goal("ready after", 60, "s", round(ready, 1)),
            Goal("CPU time until then", None, "s", round(used, 1)),
            Goal("resident memory", 300, "MB", round(peak)),
            Goal("of a core when idle", 2, "%", round(share, 2)),
            Goal("writes to objects that are not ours", 0, "", written),
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
        table = Table("", "found", "goal", title=f"{jobs} TrainJobs, {jobs * ranks} pods")
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
