"""A gang of GPU jobs is suspended and resumed as any other: real containers and CRIU, simulated GPUs."""

from __future__ import annotations

import pytest
from tests.gpusim.conftest import MakeGang

from stasis.agent.cuda.driver import State
from stasis.core.steps import Step

pytestmark = [pytest.mark.root, pytest.mark.criu]


@pytest.mark.parametrize("driver", ["api", pytest.param("cli", marks=pytest.mark.slow)])
def test_suspended_and_resumed_on_other_gpus(gangs: MakeGang, monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    monkeypatch.setenv("STASIS_CUDA_DRIVER", driver)
    one = gangs(["H100"] * 4)
    one.progress()
    assert [one.on(rank) for rank in range(2)] == [{"/dev/nvidia0"}, {"/dev/nvidia1"}]
    report = one.operator.suspend()
    assert {result["processes"] for result in report.results[Step.LOCK_DEVICES].values()} == {1}
    assert one.gang.wait(10) == {0: 143, 1: 143}
    one.give([3, 2])
    one.operator.resume()
    one.progress()
    assert [one.on(rank) for rank in range(2)] == [{"/dev/nvidia3"}, {"/dev/nvidia2"}]
    assert one.states() == [State.RUNNING] * 2
    one.finish()
