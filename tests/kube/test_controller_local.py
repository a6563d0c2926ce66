"""Checkpoints that commit when the nodes' disks have them: uploaded afterwards, awaited, or lost with a node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Node
from tests.kube.objects import policy
from tests.kube.processes import Controllers
from tests.kube.training import Training

from stasis.agent import kept
from stasis.errors import Unavailable
from stasis.kube.client import Policies, TrainJobs, meta
from stasis.store.checkpoint import list_checkpoints

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("webhook")]


class Registry:
    """Takes uploads when it is `up`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up = Event()
        self._upload = kept.upload
        monkeypatch.setattr(kept, "upload", self.upload)

    def upload(self, *args: Any) -> None:
        if not self.up.is_set():
            raise Unavailable("the registry is down")
        self._upload(*args)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(monkeypatch)


@pytest.fixture
def training(
    controllers: Controllers, client: Client, namespace: str, tmp_path: Path, registry: Registry
) -> Iterator[Training]:
    controllers.only(1)
    client.create(policy("default", namespace, durability="Local"))
    with Training(controllers, client, namespace, tmp_path) as training:
        training.until(controllers.leader, "a controller leads")
        training.start()
        yield training
        assert not training.trouble, training.trouble


def condition(training: Training, kind: str) -> tuple[str, str, str]:
    """Of the last checkpoint."""
    found = (training.checkpoints()[-1].get("status") or {}).get("conditions") or ()
    return next(((c["status"], c["reason"], c["message"]) for c in found if c["type"] == kind), ("", "", ""))


def suspend(training: Training) -> None:
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.until(lambda: training.holds("Released"), "it is released")


def tags(training: Training) -> list[str]:
    repository = training.checkpoints()[-1]["status"]["repository"]
    return [listed.tag for listed in list_checkpoints(repository)]


def test_a_suspend_does_not_wait_for_the_registry_and_a_resume_does(training: Training, registry: Registry) -> None:
    suspend(training)
    nodes = sorted(training.nodes)
    assert training.holds("Complete")
    status, reason, message = condition(training, "Durable")
    assert (status, reason) == ("False", "Local")
    assert message.startswith(f"not yet in the registry, only on nodes {', '.join(nodes)}")
    training.until(lambda: "the registry is down" in condition(training, "Durable")[2], "the cause is said")
    assert f'stasis_not_durable_seconds{{namespace="{training.namespace}",' in training.controllers.metrics()
    training.resume()
    training.until(lambda: "NotDurable" in training.events(), "the user is told")
    assert training.suspended()
    assert tags(training) == []
    training.controllers.only(0)  # the next one asks on
    training.controllers.only(1)
    registry.up.set()
    training.until(lambda: training.holds("Restored"), "it is restored")
    assert training.holds("Durable")
    assert tags(training) == [meta(training.checkpoints()[-1])["name"]]
    training.progress()
    assert training.unbroken()


def test_what_was_on_a_node_that_is_gone_is_lost_and_the_one_before_it_is_named(
    training: Training, registry: Registry
) -> None:
    registry.up.set()
    suspend(training)
    training.until(lambda: training.holds("Durable"), "it is durable")
    first = meta(training.checkpoints()[-1])["name"]
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    registry.up.clear()
    suspend(training)
    node = sorted(training.nodes)[0]
    training.client.delete(Node, node)
    training.patch(Policies, {"spec": {"timeoutSeconds": 10}}, "default")
    training.until(lambda: training.holds("Lost"), "it is lost")
    assert condition(training, "Durable")[:2] == ("False", "Lost")
    assert f"its only copy is on node {node}" in condition(training, "Lost")[2]
    training.resume()
    training.until(lambda: "Lost" in training.events(), "the user is told")
    assert condition(training, "Restored")[0] == "False"
    assert training.suspended()
    training.suspend()
    second = meta(training.checkpoints()[-1])["name"]
    training.patch(TrainJobs, {"metadata": {"annotations": {"stasis.dev/from": f"{first}/{second}"}}})
    training.until(lambda: training.gate() == f"held/{first}", "the first one is chosen")


def test_a_part_that_its_node_does_not_have_any_more_is_lost(training: Training, registry: Registry) -> None:
    suspend(training)
    for node in training.nodes.values():
        for entry in (training.folder / f"state-{node.name}").glob("*.kept"):
            entry.unlink()
    training.until(lambda: training.holds("Lost"), "it is lost")
    assert "does not have it any more" in condition(training, "Lost")[2]
