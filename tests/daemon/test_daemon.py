"""A gang is suspended and resumed by orders over the daemon's connection, as in a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.daemon.lab import Lab
from tests.daemon.process import until

from stasis.core import machine as m
from stasis.core.plan import Kind, Outcome
from stasis.core.steps import Step

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]


def test_suspend_and_resume(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    operation = one.begin_suspend()
    assert one.frozen() == [0, 1]  # alive until kubelet says that their pods end
    assert one.gang.statuses() == {0: None, 1: None}
    assert one.prestop(0) == "the pod does not end"  # whoever asked, it was not kubelet
    assert one.frozen() == [0, 1]
    assert one.end_pods() == {0: "released", 1: "released"}
    assert operation.outcome() is Outcome.RELEASED, operation.failures()
    one.forget(operation)
    one.resume()


def test_a_checkpoint_while_training_goes_on(lab: MakeLab) -> None:
    one = lab(ballast=8 << 20)
    one.progress()
    assert one.prestop(0) == "nothing to wait for"
    assert one.prestop(1) == "nothing to wait for"
    found = one.ask("POST", "/v1/check", {"container_id": one.pods[1]})
    assert found["findings"] == []
    assert found["needs"]["private"] > 8 << 20
    operation = one.checkpoint(Kind.CONTINUE)
    assert operation.outcome() is Outcome.CONTINUED, operation.failures()
    assert one.controller is not None
    assert {told.rank for told in one.controller.progress} == {0, 1}
    one.progress()
    metrics = one.daemon.get("/metrics", one.daemon.metrics_port)
    assert 'stasis_agent_step_seconds_count{step="capture"} 2.0' in metrics
    assert 'stasis_agent_members{state="idle"} 2.0' in metrics
    logged = [line for line in one.daemon.lines() if line.get("step") == Step.STORE]
    assert [(line["job"], line["checkpoint"]) for line in logged] == [(one.name, one.home.name)] * 2
    assert {line["rank"] for line in logged} == {0, 1}
    # Nobody says that it is over: the next agent sees so by itself.
    one.daemon.restart()
    assert until(lambda: not one.left(operation.spec.op)), one.left(operation.spec.op)


def test_another_operation_in_the_same_container_is_refused(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    operation = one.begin_suspend()
    home = one.home
    second = one.checkpoint()
    assert second.outcome() is Outcome.ABORTED
    assert f"takes part in operation {operation.spec.op} (Busy)" in second.failures()[0]
    one.home = home
    assert one.end_pods() == {0: "released", 1: "released"}
    assert operation.outcome() is Outcome.RELEASED


def test_a_deposed_controller_is_told_so(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    operation = one.begin_suspend()
    second = one.lead(operation.spec)
    assert until(lambda: any(report.epoch == one.epoch for report in second.reports))
    assert operation.outcome() is Outcome.SUPERSEDED
    assert one.end_pods() == {0: "released", 1: "released"}
    assert second.outcome() is Outcome.RELEASED, second.failures()


def test_a_rank_that_ends_by_itself_ends_it_with_the_status_that_kubelet_tells(lab: MakeLab) -> None:
    one = lab(ballast=64 << 20)
    one.progress()
    (one.control / "stop").touch()
    operation = one.checkpoint(Kind.CONTINUE)
    for rank in (0, 1):
        one.tell_end(rank)
    assert operation.outcome() is Outcome.ABORTED
    ended = next(notice for notice in operation.notices if isinstance(notice, m.Ended))
    assert set(ended.exited.values()) <= {0}, operation.failures()


def test_a_placeholder_is_told_to_run(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    operation = one.begin_suspend()
    one.end_pods()
    assert operation.outcome() is Outcome.RELEASED
    before = json.dumps(one.gang.lines)
    one.replace()
    for rank in (0, 1):
        one.ask("POST", "/v1/word", {"container_id": one.pods[rank], "word": "run"})
    one.progress()
    assert len(json.dumps(one.gang.lines)) > len(before)
    assert [line.split()[1] for line in one.gang.lines[0] if line.startswith("step 0 ")] == ["0", "0"]
