"""A gang in containers on this machine, its pods and its checkpoint in a real API, and the daemon as a process."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightkube import Client
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType
from tests.daemon.controller import Controller, Operation
from tests.daemon.process import GONE, Authority, Daemon, context, until
from tests.gang.lab import TIMING
from tests.support.apiserver import ApiServer

from stasis.agent import provision
from stasis.agent.freezer import Freezer
from stasis.agent.network.lock import is_locked
from stasis.core.frames import Forget, Home
from stasis.core.plan import Kind, Outcome, Spec, Timing
from stasis.core.records import Record, decision_key
from stasis.core.steps import Step
from stasis.demo.proof import steps
from stasis.kube.client import Checkpoints, meta
from stasis.kube.records import ApiRecords
from stasis.local.gang import GangSpec, LocalGang

NAMESPACE = "default"


class Lab:
    """Plays kubelet, the Job controller and the user. `daemon` serves both ranks: one node."""

    def __init__(
        self,
        name: str,
        folder: Path,
        api: ApiServer,
        *,
        pause: float = 0.02,
        ballast: int = 0,
        repository: str = "",
        local: bool = False,
    ) -> None:
        self.name = name
        self.folder = folder
        self.repository = repository or f"{folder}/store"
        self.local = local
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
        for job in jobs.values():
            job["local"] = self.local
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

    def forget_but_kept(self, operation: Operation) -> None:
        """Of one whose checkpoint lies on the node's disk."""
        assert self.controller is not None
        self.controller.send(Forget(operation.spec.op))
        known = (".kept", ".home")
        assert until(lambda: not [path for path in self.left(operation.spec.op) if not path.endswith(known)])

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
                "repository": self.repository,
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
