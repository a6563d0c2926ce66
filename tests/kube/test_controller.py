"""Suspend and resume by the real controller, on a real API, with the real webhook and the agents' real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client
from tests.kube.training import Training
from tests.support.apiserver import ApiServer

from stasis.kube.client import meta

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("webhook")]


@pytest.fixture
def training(
    client: Client, api: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    with Training(client, api, namespace, tmp_path) as training:
        monkeypatch.setattr("stasis.daemon.preflight.word", lambda body: training.world.word(body["container_id"]))
        yield training
        assert not training.trouble, training.trouble


def run(training: Training) -> None:
    training.controller()
    training.create()
    training.until(training.runs, "the training runs")
    training.progress()


def test_a_training_is_suspended_and_resumed_where_it_stopped(training: Training) -> None:
    run(training)
    training.suspend()
    training.until(lambda: training.holds("Released"), "it is released")
    training.until(training.suspended, "its pods are gone")
    checkpoint = training.checkpoints()[-1]
    assert training.gate() == f"held/{meta(checkpoint)['name']}"
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    assert training.unbroken()
