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
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from lightkube import ApiError, Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event, Namespace, Node, Pod
from lightkube.types import PatchType
from tests.support.apiserver import REPO, ApiServer

from stasis.agent.executor import FINAL
from stasis.agent.journal import BOOT_ID, StateDir
from stasis.agent.node import Job
from stasis.agent.ports import JournalPort
from stasis.agent.records import Records
from stasis.agent.runner import BootClock, Runner
from stasis.api import names
from stasis.controllers.authority import make_authority, make_leaf, utcnow
from stasis.core import driver
from stasis.core import machine as m
from stasis.core.driver import MemberDriver, Reply
from stasis.core.frames import Home
from stasis.core.member import Member
from stasis.core.rankconfig import RankConfig
from stasis.core.records import Failure
from stasis.core.steps import Step
from stasis.daemon import records
from stasis.daemon.metrics import Metrics
from stasis.daemon.pods import ApiPods
from stasis.daemon.ranks import Ranks
from stasis.daemon.server import Connections, Server
from stasis.errors import CheckpointFailed, StasisError
from stasis.kube.client import Checkpoints, JobSets, TrainJobs, annotation, meta
from stasis.kube.records import ApiRecords
from stasis.store.connect import open_repository
from stasis.store.writer import RankWriter

PERIOD = 0.03  # seconds between two looks of what is played
BEAT = 0.01  # seconds between two numbers of a program
RANKS = 2
TIMEOUT = 40.0
LEASE = {"--lease-seconds": "2", "--lease-retry": "0.3"}


class Program:
    """What runs in one container: `waiting` (a placeholder), `running`, `frozen`, `ended`."""

    def __init__(self, rank: int, state: str) -> None:
        self.rank = rank
        self.state = state
        self.count = 0


class World:
    """All programs, and what they printed: `lines[rank]` over all containers of a rank."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs: dict[str, Program] = {}
        self.lines: dict[int, list[int]] = {}
        self.saved: dict[str, int] = {}  # manifest -> count
        self.failing: dict[Step, StasisError] = {}
        self.on_step: Callable[[Step, int], None] = lambda step, rank: None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with self.lock:
                for program in self.programs.values():
                    if program.state == "running":
                        program.count += 1
                        self.lines.setdefault(program.rank, []).append(program.count)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def start(self, container: str, rank: int, *, placeholder: bool) -> None:
        with self.lock:
            self.programs[container] = Program(rank, "waiting" if placeholder else "running")

    def stop(self, container: str) -> bool:
        """SIGTERM, which a frozen program does not react to; whether it has ended."""
        with self.lock:
            program = self.programs.get(container)
            if program is not None and program.state in ("running", "waiting"):
                program.state = "ended"
            return program is None or program.state == "ended"

    def word(self, container: str) -> None:
        with self.lock:
            program = self.programs[container]
            if program.state == "waiting":
                program.state = "running"

    def states(self) -> list[str]:
        with self.lock:
            return sorted(p.state for p in self.programs.values() if p.state != "ended")


class PlayedExecutor:
    """One rank's steps, on a program."""

    def __init__(self, world: World, progress: Callable[[int], None]) -> None:
        self._world = world
        self._progress = progress
        self._job: Job | None = None
        self._count = 0
        self._pool = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None:
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._run, step, args, token, reply)

    def _run(self, step: Step, args: Mapping[str, Any], token: int, reply: Reply) -> None:
        began = BootClock().now()
        try:
            if step in (Step.PREPARE, Step.PLACE):
                self._job = Job.from_args(args)
            rank = self._job.rank if self._job else -1
            if step is Step.STORE:
                self._progress(2048)
            self._world.on_step(step, rank)
            if (error := self._world.failing.get(step)) is not None:
                raise error
            result = self._carry_out(step)
        except StasisError as error:
            again = not isinstance(error, FINAL)
            reply(m.StepFailed(token, Failure.of(error, step=step, retryable=again)))
            return
        except Exception as error:
            reply(m.StepFailed(token, Failure(type(error).__name__, str(error), step=step)))
            return
        reply(m.StepDone(token, {**result, "began": began, "ended": BootClock().now()}))

    def _carry_out(self, step: Step) -> dict[str, Any]:
        world = self._world
        with world.lock:
            program = world.programs.get(self._job.container_id) if self._job else None
            if program is None:
                if step in (Step.PREPARE, Step.PLACE):
                    raise CheckpointFailed("no such container")
                return {}
            match step:
                case Step.PREPARE if program.state != "running":
                    raise CheckpointFailed(f"the program is {program.state}")
                case Step.PLACE if program.state != "waiting":
                    raise CheckpointFailed(f"the placeholder is {program.state}")
                case Step.FREEZE if program.state == "running":
                    program.state = "frozen"
                case Step.LOCK_NETWORK:
                    return {"in_flight": 0}
                case Step.CAPTURE:
                    assert program.state == "frozen"
                    self._count = program.count
                    return {"size": 4096, "connections": [], "bound": []}
                case Step.THAW if program.state == "frozen":
                    program.state = "running"
                case Step.RELEASE:
                    program.state = "ended"
                case Step.RESTORE:
                    assert self._job is not None
                    program.state, program.count = "frozen", world.saved[self._job.manifest]
                case Step.TEAR_DOWN if program.state != "ended":
                    program.state, program.count = "waiting", 0
        return self._store() if step is Step.STORE else {}

    def _store(self) -> dict[str, Any]:
        job = self._job
        assert job is not None
        config = RankConfig(
            uid=job.uid,
            rank=job.rank,
            world_size=job.world_size,
            root=7,
            threads=1,
            last_pid=9,
            hostname=f"rank-{job.rank}",
            init="/stasis/0123abcd/init",
            addresses={rank: list(known[:1]) for rank, known in job.addresses.items()},
            sizes={"memory": 1 << 20},
        )
        with open_repository(job.repository) as repository:
            writer = RankWriter(repository, uid=job.uid, rank=job.rank)
            writer.put("criu/pages-1.img", os.urandom(4096))
            manifest = writer.finish(config.to_dict()).manifest.digest
        self._world.saved[manifest] = self._count
        return {"manifest": manifest}


class PlayedGuardian:
    """Holds no deadline; the fate is as the agent claims it."""

    def __init__(self) -> None:
        self._fate: str | None = None

    def arm(self, op: str, deadline: float, poll: float, reply: Reply) -> None:
        self._fate = self._fate or ""
        reply(m.GuardianUp(deadline))

    def claim(self, value: str) -> str:
        self._fate = self._fate or value
        return self._fate

    def fate(self) -> str | None:
        return self._fate

    def disarm(self) -> None:
        self._fate = None


class PlayedAgent:
    """What `daemon.Ranks` needs of an agent: real journals and records, played programs."""

    def __init__(self, folder: Path, world: World) -> None:
        self.state = StateDir(folder)
        self.records = Records(folder / "records")
        self._world = world
        self._guardians: dict[str, PlayedGuardian] = {}

    def member(
        self,
        op: str,
        rank: int,
        *,
        clock: BootClock,
        transport: driver.Transport,
        records: driver.Records,
        progress: Callable[[int], None],
        carry_out: Callable[[Any], driver.Executor],
        observe: driver.Observer,
        failed: Callable[[BaseException], None],
        **_: Any,
    ) -> Runner:
        executor = PlayedExecutor(self._world, progress)
        guardian = self._guardians.setdefault(f"{op}.{rank}", PlayedGuardian())
        return Runner(
            lambda wake: MemberDriver(
                Member(rank),
                boot=BOOT_ID.read_text().strip(),
                clock=clock,
                transport=transport,
                records=records,
                executor=carry_out(executor),
                guardian=guardian,
                journal=JournalPort(self.state, f"{op}.{rank}"),
                wake=wake,
                observe=observe,
            ),
            clock,
            executor.close,
            failed,
        )

    def take_over(self, release: Any) -> None:
        """Nothing outlives a played agent."""

    def forget(self, op: str) -> None:
        for name in self.state.names("member"):
            if name.startswith(f"{op}."):
                self.state.remove("member", name)


@dataclass
class PlayedNode:
    """A node's daemon, on an address of its own of the loopback network."""

    name: str
    address: str
    ranks: Ranks | None = None
    server: Server | None = None
    runners: list[web.AppRunner] = field(default_factory=list)


class Controllers:
    """The controller's processes, as many as are started; they serve all trainings of a test run."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.port, self.node_port = free_port(), free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._http: dict[int, int] = {}  # PID -> port
        self._networks = itertools.count(1)
        authority = make_authority(utcnow())
        for name in ("controller", "agent"):
            leaf = make_leaf(authority, [f"{name}.stasis.dev"], utcnow())
            files = {"ca.crt": authority.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}
            (folder / name).mkdir(parents=True)
            for file, data in files.items():
                (folder / name / file).write_bytes(data)
        client = api.client()
        client.create(Namespace(metadata=ObjectMeta(name="stasis")))

    def network(self) -> int:
        """For the addresses of nodes: 127.N.0.0/16."""
        return next(self._networks)

    def tls(self) -> ssl.SSLContext:
        """An agent's."""
        folder = self.folder / "agent"
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return context

    def start(self) -> subprocess.Popen[bytes]:
        """Another one."""
        options = {
            "--repository": f"oci:{self.folder}/store",
            "--namespace": "stasis",
            "--agent-port": self.port,
            "--http-port": (http := free_port()),
            "--certificates": self.folder / "controller",
            "--kubeconfig": self.api.kubeconfig,
            "--log-level": "debug",
            **LEASE,
        }
        with open(self.folder / f"controller-{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "stasis.controllers", *(str(part) for pair in options.items() for part in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(REPO / "operator/src"), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self.processes.append(process)
        self._http[process.pid] = http
        return process

    def metrics(self) -> str:
        """Of the leader."""
        leader = self.leader()
        assert leader is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http[leader.pid]}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def alive(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]

    def only(self, count: int) -> None:
        """Have so many of them."""
        alive = self.alive()
        for process in alive[count:]:
            self.kill(process)
        for _ in range(count - len(alive)):
            self.start()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()

    def leader(self) -> subprocess.Popen[bytes] | None:
        """The one that wrote last that it leads."""
        for process in reversed(self.alive()):
            log = self.folder / f"controller-{self.processes.index(process)}.log"
            text = log.read_text()
            if text.rfind("leads, as") > text.rfind("leads no more"):
                return process
        return None

    def close(self) -> None:
        for process in self.alive():
            self.kill(process)


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
        client = self.controllers.api.client()

        def of(home: Home) -> ApiRecords:
            return ApiRecords(client, home.namespace, home.name, home.uid)

        node.ranks = Ranks(
            agent,  # type: ignore[arg-type]
            ApiPods(client),
            of,
            lambda home, op: records.over(client, home, op),
            connections.send,
            self.trouble.append,
            metrics,
        )
        node.server = Server(node.ranks, connections, metrics, {"node": node.name})
        ports = self.controllers.port, self.controllers.node_port
        apps = (node.server.controllers(), self.controllers.tls()), (node.server.kubelet(), None)
        for port, (app, tls) in zip(ports, apps, strict=True):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, node.address, port, ssl_context=tls).start()
            node.runners.append(runner)

    async def _end(self) -> None:
        for node in self.nodes.values():
            for runner in node.runners:
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
        spec = {**template["spec"], "nodeName": list(self.nodes)[(rank + number // RANKS) % RANKS]}
        self.client.create(Pod.from_dict({"metadata": {**metadata, "namespace": self.namespace}, "spec": spec}))

    def _kubelets(self) -> None:
        for pod in self.pods():
            container = str(pod.metadata.uid)
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
            while not self._over.is_set():
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(url, timeout=30).read()
                if self.world.stop(container):
                    break
                time.sleep(PERIOD)
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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
