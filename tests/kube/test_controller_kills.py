"""Controllers that die, that stop, that are two: at each stage of a suspend and of a resume. The training goes on as if
nothing had been."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from tests.kube.processes import Controllers
from tests.kube.training import Training

from stasis.core.steps import Step
from stasis.kube.client import JobSets

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("webhook")]

SUSPEND = (Step.PREPARE, Step.FREEZE, Step.CAPTURE, Step.STORE, Step.RELEASE)
RESUME = (Step.PLACE, Step.RESTORE, Step.POKE_NETWORK, Step.THAW, Step.REBUILD)


@pytest.fixture
def training(controllers: Controllers, client: Client, namespace: str, tmp_path: Path) -> Iterator[Training]:
    controllers.only(2)
    with Training(controllers, client, namespace, tmp_path) as training:
        training.until(controllers.leader, "a controller leads")
        training.start()
        yield training
        for process in controllers.alive():
            process.send_signal(signal.SIGCONT)
        assert not training.trouble, training.trouble


class Leader:
    """Does something to the leader, once for each of these steps, at the moment when a rank begins it."""

    def __init__(self, training: Training, steps: tuple[Step, ...], number: signal.Signals) -> None:
        self._training = training
        self._left = set(steps)
        self._number = number
        self._lock = threading.Lock()
        self.hit: list[Step] = []
        training.world.on_step = self._begins

    def _begins(self, step: Step, rank: int) -> None:
        with self._lock:
            if step not in self._left:
                return
            self._left.discard(step)
            controllers = self._training.controllers
            leader = controllers.leader()
            if leader is None:
                return
            self.hit.append(step)
            leader.send_signal(self._number)
            if self._number is signal.SIGKILL:
                leader.wait()
                controllers.start()


def there_and_back(training: Training) -> None:
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.until(lambda: training.holds("Released"), "it is released")
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.until(training.runs, "it runs")
    training.progress()
    assert training.unbroken()
    training.until(lambda: training.gate() == "", "the gate is open")
    jobset = training.get(JobSets)
    assert jobset is not None
    assert not jobset["spec"].get("suspend")


@pytest.mark.parametrize("step", [*SUSPEND, *RESUME])
def test_the_leader_is_killed_at_a_stage(training: Training, step: Step) -> None:
    leader = Leader(training, (step,), signal.SIGKILL)
    there_and_back(training)
    assert leader.hit == [step]


@pytest.mark.parametrize("steps", [SUSPEND[1:3], RESUME[1:3]], ids=["suspend", "resume"])
def test_a_leader_that_stood_still_comes_back_beside_its_successor(training: Training, steps: tuple[Step, ...]) -> None:
    """Both believe that they lead; only one is obeyed."""
    leader = Leader(training, steps[:1], signal.SIGSTOP)
    stopped = training.controllers.alive()

    def wake(step: Step, rank: int) -> None:
        if step is steps[1]:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        leader._begins(step, rank)

    training.world.on_step = wake
    there_and_back(training)
    assert leader.hit


def test_no_controller_at_all_for_a_while(training: Training) -> None:
    for process in training.controllers.alive():
        training.controllers.kill(process)
    training.suspend()
    training.progress()
    training.resume()
    training.suspend()
    training.progress()
    training.controllers.only(1)
    there_and_back(training)
