"""A cluster around the controller, played: Trainer, JobSet, Job and kubelet act on the real API as real ones do, and
the nodes' agents are the real daemon's server and members, with programs that only count in place of processes.

A program prints a number, one more each time. Suspended and resumed, a rank's numbers go on as if nothing had been:
each comes once, in order, whatever was killed on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from lightkube import ApiError, Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event, Node, Pod
from lightkube.types import PatchType
from tests.kube.agents import PlayedAgent, PlayedNode, World
from tests.kube.processes import Controllers

from stasis.api import names
from stasis.core.frames import Home
from stasis.daemon import records
from stasis.daemon.metrics import Metrics
from stasis.daemon.pods import ApiPods
from stasis.daemon.ranks import Ranks
from stasis.daemon.server import Connections, Server
from stasis.daemon.uploads import Uploads
from stasis.kube.client import Checkpoints, JobSets, TrainJobs, annotation, configuration, connect, meta
from stasis.kube.records import ApiRecords

TIMEOUT = 40.0
PERIOD = 0.03  # seconds between two looks of what is played
RANKS = 2


class Training:
    """One TrainJob of two ranks, a node each, and all that acts on it. Use as a context."""

    def __init__(
        self, controllers: Controllers, client: Client, namespace: str, folder: Path, name: str = "gpt"
    ) -> None:
        self.controllers, self.client, self.namespace, self.folder, self.name = (
            controllers,
            client,
            namespace,
            folder,
            name,
        )
        self.network = controllers.network()
        self.world = World()
        self.pending = False  # pods stay Pending
        self.claims: list[str] = []  # of volumes that the pods write to
        self.nodes: dict[str, PlayedNode] = {}
        self.trouble: list[BaseException] = []
        self._serial = itertools.count()
        self._applied: tuple[Any, ...] = ()
        self._over = threading.Event()
        self._ending: set[str] = set()
        self._pool = ThreadPoolExecutor(16)
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, daemon=True),
            threading.Thread(target=self._play, daemon=True),
        ]

    def __enter__(self) -> Training:
        self._threads[0].start()
        for number in range(RANKS):
            self._add_node(number)
        self._threads[1].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ApiError):
            self.client.delete(TrainJobs, self.name, namespace=self.namespace)
        self._over.set()
        self._threads[1].join()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join()
        self._loop.close()
        self._pool.shutdown(wait=True)
        self.world.close()
        for node in self.nodes.values():
            with contextlib.suppress(ApiError):
                self.client.delete(Node, node.name)

    # ------------------------------------------------------------ nodes

    def _add_node(self, number: int) -> None:
        node = PlayedNode(f"{self.namespace}-{self.name}-{number}", f"127.{self.network}.{number + 1}.1")
        self.nodes[node.name] = node
        self.client.create(Node(metadata=ObjectMeta(name=node.name)))
        addresses = {"status": {"addresses": [{"type": "InternalIP", "address": node.address}]}}
        self.client.patch(Node.Status, node.name, addresses)
        asyncio.run_coroutine_threadsafe(self._serve(node), self._loop).result(30)

    async def _serve(self, node: PlayedNode) -> None:
        connections, metrics = Connections(), Metrics()
        agent = PlayedAgent(self.folder / f"state-{node.name}", self.world)
        client = connect(configuration(self.controllers.api.kubeconfig_of("agent")))

        def of(home: Home) -> ApiRecords:
            return ApiRecords(client, home.namespace, home.name, home.uid)

        uploads = Uploads(agent.state, lambda home: records.need(client, home), 0)
        node.ranks = Ranks(
            agent,  # type: ignore[arg-type]
            ApiPods(client),
            of,
            lambda home, op: records.over(client, home, op),
            uploads,
            connections.send,
            self.trouble.append,
            metrics,
        )
        node.server = Server(node.ranks, uploads, connections, metrics, {"node": node.name})
        ports = self.controllers.port, self.controllers.node_port
        apps = (node.server.controllers(), self.controllers.tls()), (node.server.kubelet(), None)
        for port, (app, tls) in zip(ports, apps, strict=True):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, node.address, port, ssl_context=tls).start()
            node.runners.append(runner)

    def power_off(self, name: str) -> None:
        """The node is gone with all that runs on it, and the node controller has seen it: nothing of its pods is told
        any more."""
        node = self.nodes[name]
        node.dead = True
        for pod in self.pods():
            if pod.spec.nodeName == name:
                self.world.power_off(str(pod.metadata.uid))
        asyncio.run_coroutine_threadsafe(self._end_node(node), self._loop).result(30)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": now}
        self.client.patch(Node.Status, name, {"status": {"conditions": [ready]}})

    def collect(self, name: str) -> None:
        """What the garbage collector of pods does where a node is deleted, or marked as out of service."""
        for pod in self.pods():
            if pod.spec.nodeName == name:
                self.client.delete(Pod, pod.metadata.name, namespace=self.namespace, grace_period=0)

    async def _end(self) -> None:
        for node in self.nodes.values():
            if not node.dead:
                await self._end_node(node)

    async def _end_node(self, node: PlayedNode) -> None:
        for runner in node.runners:
            with contextlib.suppress(asyncio.CancelledError):  # of a request that was being answered
                await runner.cleanup()
        assert node.ranks is not None
        assert node.server is not None
        node.ranks.close()
        node.server.close()

    # ------------------------------------------------------------ Trainer, JobSet, Job, kubelet

    def _play(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self._trainer()
                self._jobs()
                self._kubelets()
            except ApiError as error:
                if error.status.code not in (404, 409, 429):
                    self.trouble.append(error)
            except Exception as error:
                self.trouble.append(error)

    def _trainer(self) -> None:
        """Applies the JobSet, by force, whenever the TrainJob or the JobSet is another one than before."""
        job, jobset = self.get(TrainJobs), self.get(JobSets)
        if job is None:
            if jobset is not None:
                self.client.delete(JobSets, self.name, namespace=self.namespace)
            return
        state = (meta(job)["uid"], meta(job)["generation"], jobset and meta(jobset)["resourceVersion"])
        if state == self._applied:
            return
        suspend = bool(job["spec"].get("suspend"))
        before = next((c for c in (job.get("status") or {}).get("conditions") or () if c["type"] == "Suspended"), None)
        if suspend or before is not None:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            status = "True" if suspend else "False"
            if before is None or before["status"] != status:
                condition = {"type": "Suspended", "status": status, "reason": "Suspended", "message": ""}
                change = {"status": {"conditions": [{**condition, "lastTransitionTime": now}]}}
                self.patch(TrainJobs.Status, change)
        applied = self.client.apply(self._jobset(job, suspend), field_manager="trainer", force=True)
        self._applied = (*state[:2], meta(applied)["resourceVersion"])

    def _jobset(self, job: Any, suspend: bool) -> Any:
        patches = job["spec"].get("runtimePatches") or ()
        labels = {}
        for patch in patches:
            labels |= patch["trainingRuntimeSpec"]["template"]["metadata"].get("labels", {})
        pod = {
            "metadata": {"labels": labels},
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "node", "image": "i", "command": ["train"]}],
                "volumes": [{"name": c, "persistentVolumeClaim": {"claimName": c}} for c in self.claims],
            },
        }
        node = {
            "name": "node",
            "template": {"spec": {"parallelism": RANKS, "completions": RANKS, "template": pod}},
        }
        return JobSets(
            apiVersion="jobset.x-k8s.io/v1alpha2",
            kind="JobSet",
            metadata={"name": self.name, "namespace": self.namespace, "labels": labels},
            spec={"suspend": suspend, "replicatedJobs": [node]},
        )

    def _jobs(self) -> None:
        jobset = self.get(JobSets)
        pods = self.pods()
        if jobset is None or jobset["spec"].get("suspend"):
            for pod in pods:
                if pod.metadata.deletionTimestamp is None:
                    self.client.delete(Pod, pod.metadata.name, namespace=self.namespace)
            return
        there = {pod.metadata.annotations[names.COMPLETION_INDEX] for pod in pods}  # podReplacementPolicy Failed
        for rank in range(RANKS):
            if str(rank) not in there:
                self._create_pod(jobset, rank)

    def _create_pod(self, jobset: Any, rank: int) -> None:
        template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        about = template.get("metadata") or {}
        labels = {
            **(about.get("labels") or {}),
            names.JOBSET_NAME_LABEL: self.name,
            "jobset.sigs.k8s.io/replicatedjob-name": "node",
            names.COMPLETION_INDEX: str(rank),
        }
        notes = {**(about.get("annotations") or {}), names.COMPLETION_INDEX: str(rank)}
        number = next(self._serial)
        metadata = {"name": f"{self.name}-node-0-{rank}-{number}", "labels": labels, "annotations": notes}
        nodes = [node.name for node in self.nodes.values() if not node.dead]
        spec = {**template["spec"], "nodeName": nodes[(rank + number // RANKS) % len(nodes)]}
        self.client.create(Pod.from_dict({"metadata": {**metadata, "namespace": self.namespace}, "spec": spec}))

    def _kubelets(self) -> None:
        for pod in self.pods():
            container = str(pod.metadata.uid)
            if self.nodes[pod.spec.nodeName].dead:
                continue
            if pod.metadata.deletionTimestamp is not None:
                if container not in self._ending:
                    self._ending.add(container)
                    self._pool.submit(self._end_pod, pod, container)
            elif container not in self.world.programs and not self.pending:
                rank = int(pod.metadata.annotations[names.COMPLETION_INDEX])
                placeholder = bool(pod.metadata.annotations.get(names.RESTORE))
                self.world.start(container, rank, placeholder=placeholder)
                self._tell(pod, container)

    def _tell(self, pod: Any, container: str) -> None:
        number = next(self._serial)
        status = {
            "name": "node",
            "ready": True,
            "restartCount": 0,
            "image": "i",
            "imageID": "",
            "containerID": f"containerd://{container}",
            "state": {"running": {}},
        }
        ip = f"10.0.{number // 250}.{number % 250 + 1}"
        change = {"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "containerStatuses": [status]}}
        self.client.patch(Pod.Status, pod.metadata.name, change, namespace=self.namespace)

    def _end_pod(self, pod: Any, container: str) -> None:
        """preStop, SIGTERM, and the pod is gone when its containers are."""
        try:
            node = self.nodes[pod.spec.nodeName]
            identity = (pod.metadata.annotations or {}).get(names.ID, "none")
            url = f"http://{node.address}:{self.controllers.node_port}/prestop/{identity}"
            while not self._over.is_set() and not node.dead:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(url, timeout=30).read()
                if self.world.stop(container):
                    break
                time.sleep(PERIOD)
            if node.dead:
                return
            with contextlib.suppress(ApiError):
                self.client.delete(Pod, pod.metadata.name, namespace=self.namespace, grace_period=0)
        except Exception as error:
            self.trouble.append(error)

    # ------------------------------------------------------------ the user

    def create(self, **spec: Any) -> None:
        self.client.create(
            TrainJobs(
                metadata={
                    "name": self.name,
                    "namespace": self.namespace,
                    "labels": {names.POLICY_LABEL: "default"},
                },
                spec={"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": RANKS}, **spec},
            )
        )

    def suspend(self, wanted: bool = True) -> None:
        self.patch(TrainJobs, {"spec": {"suspend": wanted}})

    def resume(self) -> None:
        self.suspend(False)

    def patch(self, kind: Any, change: dict[str, Any], name: str = "") -> None:
        self.client.patch(kind, name or self.name, change, namespace=self.namespace, patch_type=PatchType.MERGE)

    def get(self, kind: Any, name: str = "") -> Any | None:
        try:
            return self.client.get(kind, name or self.name, namespace=self.namespace)
        except ApiError as error:
            if error.status.code != 404:
                raise
            return None

    # ------------------------------------------------------------ what is seen

    def pods(self) -> list[Any]:
        return list(self.client.list(Pod, namespace=self.namespace, labels={names.JOBSET_NAME_LABEL: self.name}))

    def checkpoints(self) -> list[Any]:
        """In the order in which they were made."""
        found = self.client.list(Checkpoints, namespace=self.namespace)
        return sorted(found, key=lambda c: (meta(c)["creationTimestamp"], len(meta(c)["name"]), meta(c)["name"]))

    def holds(self, kind: str, name: str = "") -> bool:
        """Of the last checkpoint."""
        found = [c for c in self.checkpoints() if not name or meta(c)["name"] == name]
        conditions = (found[-1].get("status") or {}).get("conditions") or () if found else ()
        return any(c["type"] == kind and c["status"] == "True" for c in conditions)

    def settled(self) -> bool:
        """All checkpoints have come to something."""
        return all((c.get("status") or {}).get("conditions") for c in self.checkpoints())

    def suspended(self) -> bool:
        jobset = self.get(JobSets)
        return bool(jobset and jobset["spec"].get("suspend")) and not self.pods()

    def gate(self) -> str:
        return annotation(self.get(JobSets) or {}, names.GATE)

    def runs(self) -> bool:
        return self.world.states() == ["running"] * RANKS

    def start(self) -> None:
        """Create it; returns once it trains."""
        self.create()
        self.until(self.runs, "the training runs")
        self.progress()

    def progress(self, count: int = 5) -> None:
        """Until every rank has printed so many more numbers."""
        before = {rank: len(self.world.lines.get(rank, ())) for rank in range(RANKS)}
        self.until(lambda: all(len(self.world.lines.get(r, ())) >= n + count for r, n in before.items()), "progress")

    def until(self, seen: Callable[[], object], what: str) -> None:
        end = time.monotonic() + TIMEOUT
        while True:
            with contextlib.suppress(ApiError):  # the server is busy with itself
                if seen():
                    return
            died = [p.pid for p in self.controllers.processes if p.poll() not in (None, -signal.SIGKILL)]
            if died or time.monotonic() > end:
                raise AssertionError(f"not seen: {what}\n{self.tell()}")
            time.sleep(0.02)

    def unbroken(self) -> bool:
        """Each rank's numbers, once each and in order."""
        with self.world.lock:
            return all(lines == list(range(1, len(lines) + 1)) for lines in self.world.lines.values())

    def events(self) -> list[str]:
        found = self.client.list(Event, namespace=self.namespace)
        return [
            str(event.reason) for event in sorted(found, key=lambda e: (str(e.firstTimestamp), str(e.metadata.name)))
        ]

    def tell(self) -> str:
        """All there is to know, for a test that failed."""
        logs = sorted(self.controllers.folder.glob("controller-*.log"))
        jobset = self.get(JobSets) or {}
        parts = [
            f"jobset: suspend {(jobset.get('spec') or {}).get('suspend')} gate {self.gate()!r}",
            f"programs: {self.world.states()}, trouble: {self.trouble}",
            f"pods: {[(p.metadata.name, p.status.phase, p.metadata.deletionTimestamp) for p in self.pods()]}",
            *(
                json.dumps({k: v for k, v in (c.get("status") or {}).items() if k != "operations"})
                for c in self.checkpoints()
            ),
            *(f"{log.name}: {log.read_text()[-3000:]}" for log in logs[-2:]),
        ]
        return "\n".join(parts)
