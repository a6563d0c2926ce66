"""Whatever is killed, and whenever: the end is the whole checkpoint, or training goes on; no rank runs twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.lab import STEPS, WORKERS, Cluster, Job, finish, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

CONTROLLER, WEBHOOK, AGENT = "-m stasis.controllers", "-m stasis.webhook", "-m stasis.daemon"
REGISTRY, GUARDIAN = "registry serve", "guardian_main"
ALL = ("stasis-e2e-control-plane", *WORKERS)


class Patient(Cluster):
    """Whose user asks again while no webhook answers: nothing of an enabled job passes then."""

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        end = time.monotonic() + 60
        while True:
            try:
                return super().kubectl(*args, stdin=stdin, check=check)
            except AssertionError as error:
                if "failed calling webhook" not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(1)


def processes(pattern: str, *nodes: str, may_be_missing: bool = False) -> Callable[[Cluster], None]:
    """Kill them on these nodes, where need be once they are back from the last time."""

    def act(cluster: Cluster) -> None:
        def killed() -> bool:
            found = [cluster.signal(node, pattern) for node in nodes]
            return any(found) or may_be_missing

        cluster.wait(f"{pattern} runs", killed, 60)

    return act


def restart(unit: str) -> Callable[[Cluster], None]:
    def act(cluster: Cluster) -> None:
        cluster.run("docker", "exec", WORKERS[0], "systemctl", "restart", unit)

    return act


VICTIMS: dict[str, Callable[[Cluster], None]] = {
    "controllers": processes(CONTROLLER, *ALL),
    "webhooks": processes(WEBHOOK, *ALL),
    "agent": processes(AGENT, WORKERS[0]),
    "agents": processes(AGENT, *WORKERS),
    "guardian": processes(GUARDIAN, WORKERS[0], may_be_missing=True),  # there is one while a rank is frozen
    "registry": processes(REGISTRY, *WORKERS),
    "kubelet": restart("kubelet"),
    "containerd": restart("containerd"),
}


class Seen:
    """What the API shows of the operations that a job has begun since this was made."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._before = {entry["op"] for entry in self._entries()}

    def _entries(self) -> list[Any]:
        return [o for c in self.job.checkpoints() for o in c.get("status", {}).get("operations", ())]

    def begun(self, kind: str) -> Any:
        return next((o for o in self._entries() if o["kind"] == kind and o["op"] not in self._before), None)

    def decided(self, kind: str, verdict: str) -> bool:
        entry = self.begun(kind)
        return entry is not None and any(record["verdict"] == verdict for record in entry.get("records", ()))


# What is seen in the API when it is time to kill, and how many seconds later.
Phase = tuple[Callable[[Seen], Any], float]
SUSPEND: dict[str, Phase] = {
    "asked": (lambda seen: True, 0.0),
    "begun": (lambda seen: seen.begun("release"), 0.0),
    "saving": (lambda seen: seen.begun("release"), 0.7),
    "committed": (lambda seen: seen.decided("release", "commit"), 0.0),
    "released": (lambda seen: seen.decided("release", "release"), 0.0),
    "ending": (lambda seen: len(seen.job.pods()) < seen.job.ranks, 0.0),
}
RESUME: dict[str, Phase] = {
    "asked": (lambda seen: True, 0.0),
    "placed": (lambda seen: len(seen.job.all_pods()) == seen.job.ranks, 0.0),
    "begun": (lambda seen: seen.begun("restore"), 0.0),
    "laying": (lambda seen: seen.begun("restore"), 0.7),
    "restored": (lambda seen: seen.decided("restore", "restored"), 0.0),
    "running": (lambda seen: seen.decided("restore", "ended"), 0.0),
}
QUICK, EVERY = [("saving", "laying")], list(zip(SUSPEND, RESUME, strict=True))


@contextmanager
def killing(job: Job, victim: str, phase: Phase) -> Iterator[None]:
    """The victim is killed when the job has come to the phase that what is done inside leads to."""
    reached, after = phase
    seen = Seen(job)
    yield
    end = time.monotonic() + 60
    while not reached(seen):
        assert time.monotonic() < end, f"it does not come to be killed\n{job.cluster.story()}"
        time.sleep(0.05)
    time.sleep(after)
    VICTIMS[victim](job.cluster)


@pytest.mark.parametrize(
    ("victim", "phases"),
    [
        pytest.param("controllers", QUICK, id="controllers"),
        pytest.param("agents", QUICK, id="agents"),
        *(pytest.param(victim, EVERY, marks=pytest.mark.slow, id=f"{victim}-at-every-phase") for victim in VICTIMS),
    ],
)
def test_a_killed_part_loses_nothing(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]], victim: str, phases: list[tuple[str, str]]
) -> None:
    name, pause = f"killed-{victim}-{len(phases)}", 0.3 if phases is QUICK else 2.5  # it has to last
    with training(Patient(cluster.environment), name, namespace, steps=STEPS, pause=pause) as job:
        job.wait_for_step(2)
        for suspend, resume in phases:
            with killing(job, victim, SUSPEND[suspend]):
                job.patch_suspend(True)
            job.wait_for_no_pods(300)
            before = job.last_steps()
            with killing(job, victim, RESUME[resume]):
                job.patch_suspend(False)
            job.wait_to_go_on(before, 300)
        finish(job, undisturbed)
