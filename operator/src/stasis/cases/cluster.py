"""One case as the trainer of a TrainJob: suspended and resumed by `kubectl patch`, judged as on one machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stasis.cases import manifest
from stasis.cases.kubectl import Namespace, kubectl
from stasis.cases.limits import LIBUV_PROBE, Place, has_resource_capability, not_shown
from stasis.cases.runner import ATTEMPTS, Result
from stasis.cases.spec import VOLUME, Case
from stasis.cases.verdict import Evidence, Verdict, judge, steps
from stasis.errors import Unavailable, UsageError

WORKERS = 3
SPARE = 60.0  # seconds more than on one machine: pods start, images are there already
LEAD = 4  # steps that a program makes while the suspend reaches it
PACE = 4  # times slower than on one machine, and twice that at each further attempt
REFUSED = ("Refused", "ResourceShort")
CREATES = 10  # attempts
POLL = 0.1


class ClusterRunner:
    """Runs cases in a namespace of its own. A context manager. `image`: has python3, and what the programs need."""

    def __init__(self, image: str, programs: Path) -> None:
        self._image = image
        self._programs = programs
        self._namespace = Namespace(f"stasis-cases-{os.getpid()}")
        self._place = Place(libuv=lambda: self._has_libuv, other_users=lambda: self._carries_other_users)

    def __enter__(self) -> ClusterRunner:
        self._namespace.__enter__()
        try:
            self._namespace.create([*manifest.policies(), manifest.pace(), manifest.claim()])
            self._namespace.run("create", "configmap", "programs", f"--from-file={self._programs}")
        except BaseException:
            self._namespace.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._namespace.__exit__()

    def __call__(self, case: Case, name: str, on_stage: Callable[[str], None]) -> Result:
        """`name`: of the job; one that no other has. Raises only for what is no fault of a case."""
        if reason := manifest.inexpressible(case.world) or not_shown(case, self._place):
            return Result(case, Verdict.NOT_SHOWN, reason)
        for attempt in range(ATTEMPTS):
            run = _Run(case, f"{name}-{attempt}", self._namespace, self._image, on_stage, PACE << attempt)
            verdict, detail = judge(run.through(), refusable=case.refusable)
            if run.same_address and verdict is Verdict.RIGHT:
                verdict, detail = Verdict.NOT_SHOWN, "its new pods have its old address every time"
            elif not run.ended_early:
                break
            on_stage(f"{'has its old address' if run.same_address else 'ended too early'}, attempt {attempt + 2}")
        return Result(case, verdict, detail, run.suspend, run.resume)

    @functools.cached_property
    def _has_libuv(self) -> bool:
        name = f"libuv-{secrets.token_hex(3)}"  # two cases may ask at the same time
        command = ["run", name, f"--image={self._image}", "--restart=Never", "--rm", "-i", "-q", "--command", "--"]
        return "True" in self._namespace.run(*command, "python3", "-B", "-c", LIBUV_PROBE)

    @functools.cached_property
    def _carries_other_users(self) -> bool:
        label = "app.kubernetes.io/name=stasis,app.kubernetes.io/component=agent"
        agents = json.loads(kubectl("get", "pods", "-A", "-l", label, "-o", "json"))["items"]
        if not agents:
            raise UsageError("no agent of Stasis is in the cluster", remedy="install its chart")
        meta = agents[0]["metadata"]
        return has_resource_capability(
            kubectl("-n", meta["namespace"], "exec", meta["name"], "--", "cat", "/proc/self/status")
        )


class _Run:
    def __init__(
        self, case: Case, name: str, namespace: Namespace, image: str, on_stage: Callable[[str], None], pace: int
    ) -> None:
        self.case = case
        self.world = case.world
        self.suspend = self.resume = 0.0
        self.ended_early = self.same_address = False
        self._name = name
        self._namespace = namespace
        self._image = image
        self._on_stage = on_stage
        self._pace = pace
        self._logs: dict[tuple[str, str], Any] = {}  # by pod's UID and container, in the pods' order
        self._address = ""  # of the last pod that had one
        text = case.program.read_text(encoding="utf-8")
        self._server = f"{name}-outside" if "OUTSIDE" in text else ""
        self._pvc = VOLUME in text

    def through(self) -> Evidence:
        self._on_stage("start")
        with self._created():
            world = self.world
            early = max(0, world.at - LEAD)
            self._until(lambda: len(self._steps()) > early or self._ended(), world.timeout + 2 * SPARE)
            if len(self._steps()) <= early or self._ended():
                return Evidence(failed=f"it did not come to its step {early}: {' | '.join(self._lines()[-3:])}")
            self._on_stage("suspend")
            started = time.monotonic()
            self._patch(suspend=True)
            self._until(lambda: self._suspended() or self._refused() or self._ended(), world.timeout + SPARE)
            if refused := self._refused():
                self._on_stage("refused; it goes on")
                return self._end(refused=refused)
            if not self._suspended():
                self.ended_early = self._status() == 0
                return self._end(failed=f"suspend: {self._message() or 'nothing is said'}")
            self.suspend = time.monotonic() - started
            self._on_stage("suspended")
            last, address = self._steps()[-1][0], self._address
            self._change_world()
            time.sleep(world.gap)
            self._on_stage("resume")
            started = time.monotonic()
            self._patch(suspend=False)
            self._until(self._restored, world.timeout + SPARE)
            if self._restored() != "True":
                return Evidence(self._lines(), failed=f"resume: {self._message() or 'nothing is said'}")
            self.resume = time.monotonic() - started
            self._on_stage("resumed")
            evidence = self._end(suspended=last)
            self.same_address = world.ip2 and self._address == address
            self.ended_early = evidence.status == 0 and steps(evidence.lines)[-1][0] == last
            return evidence

    @contextlib.contextmanager
    def _created(self) -> Iterator[None]:
        try:
            outside = self._open_server() if self._server else ""
            self._create(outside)
            yield
        finally:
            with contextlib.suppress(Unavailable):
                self._namespace.run("delete", "trainjob,trainingruntime", self._name, "--wait=false")
                if self._server:
                    self._namespace.run("delete", "pod", self._server, "--wait=false", "--ignore-not-found")

    def _create(self, outside: str) -> None:
        program = self.case.program.name
        runtime, job = manifest.job(
            self._name, program, self.world, self._image, pace=self._pace, outside=outside, pvc=self._pvc
        )
        self._namespace.create([runtime])
        left = CREATES
        while True:  # Trainer takes a moment to see a new runtime, and refuses its jobs for so long
            try:
                self._namespace.create([job])
                return
            except Unavailable:
                left -= 1
                if not left:
                    raise
                time.sleep(1)

    def _open_server(self) -> str:
        self._namespace.create([manifest.server(self._server, self._image)])
        self._namespace.run("wait", "--for=condition=Ready", f"pod/{self._server}", f"--timeout={2 * SPARE:g}s")
        pod = json.loads(self._namespace.run("get", "pod", self._server, "-o", "json"))
        return str(pod["status"]["podIP"])

    def _change_world(self) -> None:
        """What happens while the program is suspended."""
        inside = ("exec", self._server, "--")
        if self._server and self.world.server == "gone":
            self._namespace.run(*inside, "sh", "-c", f"kill $(cat {manifest.SERVER_PID})")
        elif self._server and self.world.server == "blackhole":
            self._namespace.run(*inside, "python3", "-c", manifest.FALL_SILENT)
        if self.world.pvc_grow:
            name = f"{self._name}-grows"
            self._namespace.create([manifest.appender(name, self._name, self._image)])
            done = "--for=jsonpath={.status.phase}=Succeeded"
            self._namespace.run("wait", done, f"pod/{name}", f"--timeout={2 * SPARE:g}s")

    def _patch(self, *, suspend: bool) -> None:
        change = json.dumps({"spec": {"suspend": suspend}})
        self._namespace.run("patch", "trainjob", self._name, "--type=merge", "-p", change)

    def _until(self, condition: Callable[[], object], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not condition() and time.monotonic() < end:
            time.sleep(POLL)

    # What is seen of it.

    def _pods(self) -> list[Any]:
        """Those that are there; their logs are followed from their start on."""
        pods = self._namespace.pods(self._name)
        for pod in pods:
            self._address = pod["status"].get("podIP", self._address)
            for status in _containers(pod):
                key = (pod["metadata"]["uid"], status["name"])
                if key not in self._logs and not status["state"].get("waiting"):
                    self._logs[key] = self._namespace.follow(pod["metadata"]["name"], status["name"])
        return pods

    def _lines(self) -> list[str]:
        """What the program has said, over all its pods. A file that a checkpoint carries is whole in the last one."""
        self._pods()
        of = {name: [log for (_, found), log in self._logs.items() if found == name] for name in ("node", "log")}
        return [line for log in (*of[manifest.CONTAINER], *of[manifest.LOG][-1:]) for line in list(log.lines)]

    def _steps(self) -> list[tuple[int, str]]:
        return steps(self._lines())

    def _status(self) -> int | None:
        """Of the program, in its present pod; None while it runs, and where there is none."""
        for pod in self._pods():
            if "deletionTimestamp" not in pod["metadata"]:
                for status in _containers(pod):
                    if status["name"] == manifest.CONTAINER and (ended := status["state"].get("terminated")):
                        return int(ended["exitCode"])
        return None

    def _ended(self) -> bool:
        return self._status() is not None

    def _checkpoint(self) -> Any:
        return next(iter(reversed(self._namespace.checkpoints(self._name))), {})

    def _condition(self, kind: str) -> Any:
        conditions = self._checkpoint().get("status", {}).get("conditions", ())
        return next((found for found in conditions if found["type"] == kind), {})

    def _suspended(self) -> bool:
        return not self._pods() and self._condition("Released").get("status") == "True"

    def _refused(self) -> str:
        failed = self._condition("Failed")
        return str(failed["message"]) if failed.get("reason") in REFUSED and failed["status"] == "True" else ""

    def _restored(self) -> str:
        """`True` or `False` once the restore has ended."""
        self._pods()
        return str(self._condition("Restored").get("status", ""))

    def _message(self) -> str:
        return str(self._checkpoint().get("status", {}).get("message", ""))

    def _end(self, *, refused: str = "", failed: str = "", suspended: int | None = None) -> Evidence:
        self._until(self._ended, self.world.timeout + SPARE)
        status = self._status()
        if status is not None:
            for log in self._logs.values():
                log.wait(10)
        return Evidence(self._lines(), status, suspended, refused, failed)


def _containers(pod: Any) -> list[Any]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
