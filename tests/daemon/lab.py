"""A gang in containers on this machine, its pods and its checkpoint in a real API, and the daemon as a process."""

from __future__ import annotations

import asyncio
import contextlib
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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from lightkube import Client
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType
from tests.gang.lab import TIMING
from tests.support.apiserver import ApiServer

from stasis.agent import provision
from stasis.agent.freezer import Freezer
from stasis.agent.network.lock import is_locked
from stasis.agent.runner import BootClock, RecordsPort, Runner
from stasis.core import machine as m
from stasis.core.agreement import agreement
from stasis.core.driver import CoordinatorDriver
from stasis.core.frames import Answer, Command, Forget, Home, Progress, frame_from_dict
from stasis.core.gang import Coordinator
from stasis.core.messages import Message, Report
from stasis.core.plan import Kind, Outcome, Spec, Timing
from stasis.core.records import Record, decision_key
from stasis.core.steps import Step
from stasis.demo.proof import steps
from stasis.kube.client import Checkpoints, meta
from stasis.kube.records import ApiRecords
from stasis.local.gang import GangSpec, LocalGang

NAMESPACE = "default"
GONE = 30.0  # seconds in which what is killed must be gone


class Authority:
    """Certificates as the cluster's controller makes them."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("stasis-ca")
        self.certificate = self._sign(self._name, self._key.public_key(), [], authority=True)

    def folder(self, path: Path, name: str) -> Path:
        """ca.crt, tls.crt and tls.key of `name`."""
        path.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_named(name), key.public_key(), [x509.DNSName(name)])
        encoding = serialization.Encoding.PEM
        (path / "ca.crt").write_bytes(self.certificate.public_bytes(encoding))
        (path / "tls.crt").write_bytes(certificate.public_bytes(encoding))
        (path / "tls.key").write_bytes(
            key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return path

    def _sign(
        self, name: x509.Name, key: Any, names: list[x509.GeneralName], *, authority: bool = False
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def context(folder: Path) -> ssl.SSLContext:
    """A client's, with the certificate in the folder, if there is one."""
    if not folder.exists():
        return ssl._create_unverified_context()
    found = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    found.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return found


class Daemon:
    """The agent's process. `start` after `kill` is the restart that kubelet would make."""

    def __init__(self, folder: Path, api: ApiServer, authority: Authority) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.certificates = authority.folder(folder / "agent", "agent.stasis.dev")
        self.log = folder / "daemon.log"
        self._api = api
        self.port, self.node_port, self.metrics_port = _free_port(), _free_port(), _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = {
            "--node": "here",
            "--state": self.state,
            "--certificates": self.certificates,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--node-port": self.node_port,
            "--metrics-port": self.metrics_port,
            "--kubeconfig": self._api.kubeconfig,
        }
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stasis.daemon", *(str(part) for option in options.items() for part in option)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert until(lambda: self.process is not None and (self._answers() or self.process.poll() is not None))
        assert self.process.poll() is None, self.tail()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return self.get("/healthz") == "ok\n"
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """As kubelet does after a death."""
        self.kill()
        self.start()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()

    def get(self, path: str, port: int = 0) -> str:
        """Of its port for kubelet, or another."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port or self.node_port}{path}", timeout=GONE) as answer:
            return str(answer.read().decode())

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


class Controller:
    """The cluster's controller as the daemon sees it: coordinators over one connection, which comes back."""

    def __init__(self, daemon: Daemon, certificates: Path, api: ApiServer) -> None:
        self._daemon = daemon
        self._context = context(certificates)
        self._client = api.client()
        self._loop = asyncio.new_event_loop()
        self._outgoing: asyncio.Queue[Command | Forget] = asyncio.Queue()
        self.operations: dict[str, Operation] = {}
        self.progress: list[Progress] = []
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        while True:
            try:
                async with aiohttp.ClientSession() as session, self._connect(session) as socket:
                    writing = asyncio.create_task(self._write(socket))
                    try:
                        await self._read(socket)
                    finally:
                        writing.cancel()
            except (aiohttp.ClientError, OSError):
                pass
            except asyncio.CancelledError:
                return
            await asyncio.sleep(0.05)

    def _connect(self, session: aiohttp.ClientSession) -> Any:
        return session.ws_connect(
            f"https://127.0.0.1:{self._daemon.port}/v1/gang", ssl=self._context, server_hostname="agent.stasis.dev"
        )

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            frame = await self._outgoing.get()
            await socket.send_str(json.dumps(frame.to_dict()))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for text in socket:
            frame = frame_from_dict(json.loads(text.data))
            if isinstance(frame, Progress):
                self.progress.append(frame)
            elif isinstance(frame, Answer) and (operation := self.operations.get(frame.to)):
                operation.runner.driver.post(frame.message)

    def send(self, frame: Command | Forget) -> None:
        self._loop.call_soon_threadsafe(self._outgoing.put_nowait, frame)

    def lead(self, spec: Spec, home: Home, epoch: int) -> Operation:
        operation = Operation(self, spec, home, epoch, ApiRecords(self._client, home.namespace, home.name, home.uid))
        self.operations[operation.coordinator.address] = operation
        operation.runner.start()
        return operation

    def close(self) -> None:
        for operation in self.operations.values():
            operation.runner.stop()
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
        self._thread.join()
        self._loop.close()


class Operation:
    def __init__(self, controller: Controller, spec: Spec, home: Home, epoch: int, records: ApiRecords) -> None:
        self._controller = controller
        self._home = home
        self.spec = spec
        self.records = records
        self.reports: list[Report] = []
        self.notices: list[m.Notice] = []
        self.on_notice: Callable[[m.Notice], None] = lambda notice: None
        self.ended = threading.Event()
        self.coordinator = Coordinator(spec, epoch, agreement(spec))
        clock = BootClock()
        self.runner = Runner(
            lambda wake: CoordinatorDriver(
                self.coordinator,
                clock=clock,
                transport=self,
                records=RecordsPort(records),
                notify=self._notify,
                wake=wake,
                observe=lambda machine, event: self.reports.append(event) if isinstance(event, Report) else None,
            ),
            clock,
        )

    def send(self, to: str, message: Message) -> None:
        assert not isinstance(message, Report)
        self._controller.send(Command(to, message, self._home))

    def _notify(self, notice: m.Notice) -> None:
        self.notices.append(notice)
        self.on_notice(notice)
        if isinstance(notice, m.Ended):
            self.ended.set()

    def outcome(self, timeout: float = 60.0) -> Outcome | None:
        self.ended.wait(timeout)
        return self.coordinator.outcome

    def failures(self) -> list[str]:
        return [str(f) for notice in self.notices if isinstance(notice, m.Ended) for f in notice.failures]

    def began(self, step: Step) -> bool:
        return any(isinstance(notice, m.StageBegun) and notice.stage.step is step for notice in self.notices)


class Lab:
    """Plays kubelet, the Job controller and the user. `daemon` serves both ranks: one node."""

    def __init__(self, name: str, folder: Path, api: ApiServer, *, pause: float = 0.02, ballast: int = 0) -> None:
        self.name = name
        self.folder = folder
        self.control = folder / "control"
        self.control.mkdir(parents=True)
        self.client: Client = api.client()
        self.authority = Authority()
        spec = GangSpec(
            ["python3", "/code/trainer.py", str(pause)],
            2,
            provision.rootfs(),
            provision.init(),
            env={"BALLAST": str(ballast)} if ballast else {},
            options={"volumes": {"/code": Path(__file__).parents[1] / "gang", "/control": self.control}},
        )
        self.gang = LocalGang(name, spec, folder / "gang")
        self.daemon = Daemon(folder, api, self.authority)
        self.controller: Controller | None = None
        self.pods: dict[int, str] = {}
        self.serial = 0
        self.epoch = 0
        self.home = Home(NAMESPACE, f"{name}-1", "")
        self.known: dict[str, list[str]] = {}  # addresses by which the processes know each rank
        self._api = api

    def start(self) -> None:
        self.gang.start()
        self.daemon.start()
        self.controller = Controller(
            self.daemon, self.authority.folder(self.folder / "controller", "controller.stasis.dev"), self._api
        )
        for rank in self.gang.places:
            self._make_pod(rank)

    def close(self) -> None:
        if self.controller is not None:
            self.controller.close()
        self.daemon.close()
        self.gang.delete()
        for pod in self.pods.values():
            with contextlib.suppress(Exception):
                self.client.delete(Pod, pod, namespace=NAMESPACE, grace_period=0)
        with contextlib.suppress(Exception):
            self.client.delete(Checkpoints, self.home.name, namespace=NAMESPACE)

    # ------------------------------------------------------------ kubelet and the Job controller

    def _make_pod(self, rank: int) -> None:
        place = self.gang.places[rank]
        name = self.pods[rank] = place.container.id
        pod = Pod(
            metadata=ObjectMeta(name=name, namespace=NAMESPACE),
            spec=PodSpec(containers=[Container(name="node", image="trainer")], nodeName="here"),
        )
        self.client.create(pod)
        self._tell(rank, {"running": {}})

    def _tell(self, rank: int, state: Mapping[str, Any]) -> None:
        """As kubelet tells the API of a container."""
        status = {
            "name": "node",
            "ready": True,
            "restartCount": 0,
            "image": "trainer",
            "imageID": "",
            "containerID": f"containerd://{self.gang.places[rank].container.id}",
            "state": state,
        }
        patch = {"status": {"phase": "Running", "containerStatuses": [status]}}
        self.client.patch(Pod.Status, self.pods[rank], patch, namespace=NAMESPACE)

    def tell_end(self, rank: int) -> None:
        identity = f"containerd://{self.gang.places[rank].container.id}"
        code = self.gang.places[rank].container.wait(GONE)
        self._tell(rank, {"terminated": {"exitCode": code, "containerID": identity}})

    def terminate(self, rank: int) -> None:
        """As the API server answers a deletion: the pod stays until kubelet is through."""
        self.client.delete(Pod, self.pods[rank], namespace=NAMESPACE, grace_period=60)

    def prestop(self, rank: int) -> str:
        return self.daemon.get(f"/prestop/{self.pods[rank]}").strip()

    def finish_pod(self, rank: int) -> None:
        assert self.gang.places[rank].container.wait(GONE) == 143, self.gang.lines[rank][-5:]
        self.client.delete(Pod, self.pods[rank], namespace=NAMESPACE, grace_period=0)

    def replace(self, *, new_addresses: bool = False) -> None:
        self.gang.replace(new_addresses=new_addresses)
        for rank in self.gang.places:
            self._make_pod(rank)

    # ------------------------------------------------------------ operations

    def _operation(self, kind: Kind, op: str, args: dict[Step, Any], timing: Timing, checkpoint: str = "") -> Spec:
        self.serial += 1
        spec = Spec(op, self.serial, kind, tuple(self.gang.places), args=args, timing=timing, checkpoint=checkpoint)
        found = self.client.get(Checkpoints, self.home.name, namespace=NAMESPACE)
        operations = (found.get("status") or {}).get("operations") or []
        operations.append({"op": op, "kind": str(kind), "serial": self.serial, "spec": json.dumps(spec.to_dict())})
        change = {"status": {"operations": operations}}
        self.client.patch(Checkpoints.Status, self.home.name, change, namespace=NAMESPACE, patch_type=PatchType.MERGE)
        return spec

    def begin_suspend(self) -> Operation:
        """A checkpoint up to where the released trees wait for the end of their pods."""
        operation = self.checkpoint()
        assert until(lambda: self.held() == [0, 1] or operation.ended.is_set()), self.daemon.tail()
        assert not operation.ended.is_set(), operation.failures()
        return operation

    def end_pods(self) -> dict[int, str]:
        """Delete the pods as their Job would. Returns what their hooks were answered."""
        answers: dict[int, str] = {}

        def end(rank: int) -> None:
            self.terminate(rank)
            answers[rank] = self.prestop(rank)
            self.finish_pod(rank)

        ends = [threading.Thread(target=end, args=(rank,)) for rank in self.pods]
        for one in ends:
            one.start()
        for one in ends:
            one.join(GONE)
        return answers

    def resume(self) -> None:
        """Restore the last checkpoint in placeholders, and see training go on."""
        self.replace()
        restore = self.restore()
        assert restore.outcome() is Outcome.RESTORED, (restore.failures(), self.daemon.tail())
        self.progress()
        self.forget(restore)

    def checkpoint(self, kind: Kind = Kind.RELEASE, timing: Timing = TIMING) -> Operation:
        """Begin one: its object, and its coordinator."""
        body = {
            "metadata": {"name": f"{self.name}-{self.serial + 1}", "namespace": NAMESPACE},
            "spec": {"trainJob": {"name": self.name, "uid": "0-0"}, "kind": "Suspend"},
        }
        made = self.client.create(Checkpoints(body))
        self.home = Home(NAMESPACE, meta(made)["name"], meta(made)["uid"])
        jobs = self.jobs(self.home.uid)
        return self.lead(self._operation(kind, self.home.uid, {Step.PREPARE: jobs}, timing))

    def restore(self, timing: Timing = TIMING) -> Operation:
        """Of the last checkpoint, in the placeholders."""
        commit = self.record(decision_key(self.home.uid))
        assert commit is not None
        jobs = self.jobs(self.home.uid)
        for rank, manifest in commit.manifests.items():
            jobs[str(rank)]["manifest"] = manifest
        op = f"{self.home.uid}-r{self.serial + 1}"
        return self.lead(self._operation(Kind.RESTORE, op, {Step.PLACE: jobs}, timing, self.home.uid))

    def lead(self, spec: Spec) -> Operation:
        """Another coordinator of it, with the next epoch."""
        assert self.controller is not None
        self.epoch += 1
        return self.controller.lead(spec, self.home, self.epoch)

    def forget(self, operation: Operation) -> None:
        assert self.controller is not None
        self.controller.send(Forget(operation.spec.op))
        assert until(lambda: not self.left(operation.spec.op)), self.left(operation.spec.op)

    def left(self, op: str) -> list[str]:
        """Of an operation in the daemon's state: files that nobody would ever remove."""
        files = self.daemon.state.rglob("*")
        return [str(path) for path in files if op in path.name and path.suffix != ".reservation"]

    def delete_checkpoint(self) -> None:
        self.client.delete(Checkpoints, self.home.name, namespace=NAMESPACE)

    def record(self, key: str) -> Record | None:
        return ApiRecords(self.client, self.home.namespace, self.home.name, self.home.uid).read(key)

    def jobs(self, uid: str) -> dict[str, dict[str, Any]]:
        addresses = {
            str(rank): list(dict.fromkeys([*self.known.get(str(rank), []), place.address]))
            for rank, place in self.gang.places.items()
        }
        self.known = addresses
        found = {}
        for rank, place in self.gang.places.items():
            pod = self.client.get(Pod, self.pods[rank], namespace=NAMESPACE)
            assert pod.metadata is not None
            found[str(rank)] = {
                "container_id": place.container.id,
                "rank": rank,
                "world_size": 2,
                "repository": f"{self.folder}/store",
                "addresses": addresses,
                "releases": True,
                "uid": uid,
                "pod": {
                    "namespace": NAMESPACE,
                    "name": self.pods[rank],
                    "uid": pod.metadata.uid,
                    "id": self.pods[rank],
                },
            }
        return found

    # ------------------------------------------------------------ what can be seen

    def progress(self, count: int = 3, timeout: float = 60.0) -> None:
        """Wait until every rank has done `count` more steps."""
        before = {rank: len(steps(lines)) for rank, lines in self.gang.lines.items()}
        more = self.gang.wait_for(
            lambda: all(len(steps(self.gang.lines[r])) >= n + count for r, n in before.items()), timeout
        )
        tails = {rank: lines[-6:] for rank, lines in self.gang.lines.items()}
        assert more, f"no {count} more steps: {tails}\n{self.daemon.tail()}"

    def frozen(self) -> list[int]:
        found = []
        for rank, place in self.gang.places.items():
            with contextlib.suppress(Exception):
                if Freezer.of(place.container.pid1, container_id=place.container.id).state() != "thawed":
                    found.append(rank)
        return found

    def locked(self) -> list[int]:
        found = []
        for rank, place in self.gang.places.items():
            with open(f"/proc/{place.container.pid1}/ns/net") as netns:
                if is_locked(netns.fileno()):
                    found.append(rank)
        return found

    def held(self) -> list[int]:
        """Ranks whose released trees wait for the end of their pods."""
        return [rank["rank"] for rank in self.ask("GET", "/v1/status")["ranks"] if rank["waitsForPod"]]

    def states(self) -> dict[int, str]:
        """Of the daemon's members."""
        return {rank["rank"]: rank["state"] for rank in self.ask("GET", "/v1/status")["ranks"]}

    def ask(self, method: str, path: str, body: Any = None, certificates: Path | None = None) -> Any:
        """The daemon's other calls, as its controller or with other certificates."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://localhost:{self.daemon.port}{path}", data, method=method)
        trusting = context(certificates or self.folder / "controller")
        trusting.check_hostname = False
        with urllib.request.urlopen(request, timeout=GONE, context=trusting) as answer:
            return json.load(answer)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until(done: Callable[[], Any], timeout: float = 30.0) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.005)
    return False
