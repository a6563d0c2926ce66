"""Whatever is killed, and whenever: the end is the whole checkpoint, or training goes on; no rank runs twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.lab import STEPS, WORKERS, Cluster, Job, finish, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

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
    """Kill them on these nodes."""

    def act(cluster: Cluster) -> None:
        found = [cluster.signal(node, pattern) for node in nodes]
        assert any(found) or may_be_missing

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


def operation(job: Job, kind: str) -> Any:
    """The newest of this kind that any checkpoint of the job has."""
    found = [
        entry
        for checkpoint in job.checkpoints()
        for entry in checkpoint.get("status", {}).get("operations", ())
        if (entry["kind"] == "restore") == (kind == "restore")
    ]
    return max(found, key=lambda entry: int(entry["serial"]), default=None)


def decided(job: Job, kind: str, verdict: str) -> bool:
    entry = operation(job, kind)
    return entry is not None and any(record["verdict"] == verdict for record in entry.get("records", ()))


# What is seen in the API when it is time to kill, and how many seconds later.
Phase = tuple[Callable[[Job], Any], float]
SUSPEND: dict[str, Phase] = {
    "asked": (lambda job: True, 0.0),
    "begun": (lambda job: operation(job, "release"), 0.0),
    "saving": (lambda job: operation(job, "release"), 0.7),
    "committed": (lambda job: decided(job, "release", "commit"), 0.0),
    "released": (lambda job: decided(job, "release", "release"), 0.0),
    "ending": (lambda job: len(job.pods()) < job.ranks, 0.0),
}
RESUME: dict[str, Phase] = {
    "asked": (lambda job: True, 0.0),
    "placed": (lambda job: len(job.all_pods()) == job.ranks, 0.0),
    "begun": (lambda job: operation(job, "restore"), 0.0),
    "laying": (lambda job: operation(job, "restore"), 0.7),
    "restored": (lambda job: decided(job, "restore", "restored"), 0.0),
    "running": (lambda job: decided(job, "restore", "ended"), 0.0),
}
PHASES = list(zip(SUSPEND, RESUME, strict=True))


@contextmanager
def killing(job: Job, victim: str, phase: Phase) -> Iterator[None]:
    """The victim is killed when the job has come to the phase that what is done inside leads to."""
    seen, after = phase
    yield
    end = time.monotonic() + 60
    while not seen(job) and time.monotonic() < end:  # a phase may be over before it is seen
        time.sleep(0.05)
    time.sleep(after)
    VICTIMS[victim](job.cluster)


@pytest.mark.parametrize(
    ("victim", "suspend", "resume"),
    [
        ("controllers", "saving", "laying"),
        ("agents", "saving", "laying"),
        *(
            pytest.param(victim, *phases, marks=pytest.mark.slow)
            for victim in VICTIMS
            for phases in PHASES
            if (victim, *phases) not in (("controllers", "saving", "laying"), ("agents", "saving", "laying"))
        ),
    ],
)
def test_a_killed_part_loses_nothing(
    cluster: Cluster, namespace: str, undisturbed: dict[int, list[str]], victim: str, suspend: str, resume: str
) -> None:
    with training(Patient(cluster.environment), "killed", namespace, steps=STEPS, pause=0.3) as job:
        job.wait_for_step(2)
        with killing(job, victim, SUSPEND[suspend]):
            job.patch_suspend(True)
        job.wait_for_no_pods(300)
        with killing(job, victim, RESUME[resume]):
            before = job.last_steps()
            job.patch_suspend(False)
        job.wait_to_go_on(before, 300)
        finish(job, undisturbed)
