"""A node dies with a rank: nothing waits for it, nothing is lost that was committed, and no rank may run twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Event
from tests.kube.objects import policy
from tests.kube.processes import Controllers
from tests.kube.training import Training

from stasis.core.steps import Step
from stasis.kube.client import meta

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("webhook")]


@pytest.fixture
def training(controllers: Controllers, client: Client, namespace: str, tmp_path: Path) -> Iterator[Training]:
    controllers.only(1)
    client.create(policy("default", namespace, lostAfterSeconds=2))
    with Training(controllers, client, namespace, tmp_path) as training:
        training.until(controllers.leader, "a controller leads")
        training.start()
        yield training
        assert not training.trouble, training.trouble


def node_of(training: Training, rank: int) -> str:
    return next(str(p.spec.nodeName) for p in training.pods() if p.metadata.name.startswith(f"gpt-node-0-{rank}-"))


def message(training: Training, reason: str) -> str:
    found = training.client.list(Event, namespace=training.namespace)
    return next((str(event.message) for event in found if event.reason == reason), "")


def released(training: Training) -> bool:
    """The JobSet is suspended, whatever is left of its pods."""
    return training.holds("Complete") and training.gate().startswith("held/")


def die_in(training: Training, step: Step, *, suspend: bool = True) -> str:
    """Suspend or resume it; the node of rank 1 dies when its agent comes to a step. Returns its name."""
    reached, goes_on = threading.Event(), threading.Event()

    def watch(now: Step, rank: int) -> None:
        if (now, rank) == (step, 1):
            reached.set()
            goes_on.wait(20)

    training.world.on_step = watch
    training.suspend(suspend)
    assert reached.wait(30)
    training.world.on_step = lambda now, rank: None
    node = node_of(training, 1)
    training.power_off(node)
    goes_on.set()
    return node


@pytest.mark.parametrize("step", [Step.PREPARE, Step.FREEZE, Step.STORE])
def test_before_the_commit_all_ranks_go_back_to_the_last_checkpoint(training: Training, step: Step) -> None:
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    first = meta(training.checkpoints()[-1])["name"]
    node = die_in(training, step)
    training.until(lambda: training.gate() == f"held/{first}", "all go back to the first checkpoint")
    training.until(lambda: len(training.pods()) == 1, "the survivor's pod ends")
    assert f"node {node} is not ready" in message(training, "RolledBack")
    manifests = {part["rank"]: part["manifest"] for part in training.checkpoints()[0]["status"]["ranks"]}
    training.resume()
    training.until(lambda: message(training, "WaitingForNode"), "the user is told what it waits for")
    assert f"on node {node}" in message(training, "WaitingForNode")
    assert training.world.states() == []
    printed = {rank: len(lines) for rank, lines in training.world.lines.items()}
    training.collect(node)
    training.until(training.runs, "it runs again")
    training.progress()
    for rank, lines in training.world.lines.items():
        saved = training.world.saved[manifests[rank]]
        assert lines[printed[rank] :] == list(range(saved + 1, lines[-1] + 1))


def test_without_a_checkpoint_it_begins_anew_and_its_user_is_told(training: Training) -> None:
    node = die_in(training, Step.FREEZE)
    training.until(lambda: message(training, "StartedFresh"), "the user is told")
    assert f"rank 1 (node {node} is not ready) is lost" in message(training, "StartedFresh")
    training.until(lambda: len(training.pods()) == 1, "the survivor's pod ends")
    training.collect(node)
    printed = len(training.world.lines[0])
    training.resume()
    training.until(training.runs, "it runs again")
    training.progress()
    assert training.world.lines[0][printed] == 1


def test_after_the_commit_nothing_is_lost(training: Training) -> None:
    node = die_in(training, Step.RELEASE)
    training.until(lambda: released(training) and training.holds("Released"), "it is released")
    training.until(lambda: len(training.pods()) == 1, "the survivor's pod ends")
    training.resume()
    training.until(lambda: message(training, "WaitingForNode"), "the user is told what it waits for")
    training.collect(node)
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    assert training.unbroken()


def test_in_a_restore_all_ranks_go_back_to_being_suspended_and_come_again(training: Training) -> None:
    training.suspend()
    training.until(training.suspended, "it is suspended")
    node = die_in(training, Step.RESTORE, suspend=False)
    training.until(lambda: message(training, "WaitingForNode"), "the user is told what it waits for")
    training.until(lambda: training.world.states() == [], "the survivor's placeholder ends")
    training.collect(node)
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    assert training.unbroken()
