"""The benchmark at tiny sizes: every part runs with the real tools, every figure is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import gangs
from bench.goals import GOALS
from bench.measure import Samples
from bench.run import Wanted, run
from bench.subject import GIB, Subject
from rich.console import Console

from stasis.errors import Corrupt

pytestmark = [pytest.mark.root, pytest.mark.criu]
GANGS = {"P12", "P13"}


@pytest.mark.registry
def test_a_run_finds_each_figure_and_draws_it(tmp_path: Path) -> None:
    goals = frozenset(goal.name for goal in GOALS) - GANGS
    output = tmp_path / "results" / "latest.json"
    run(Wanted(goals, (0.01,), 0.01, 1, tmp_path), output, Console(stderr=True))
    found = json.loads(output.read_text())
    assert found["ratios"].keys() == goals
    for ratio in found["ratios"].values():
        low, high = ratio["spread"]
        assert 0 < low <= high
    assert found["ratios"]["P8"]["median"] < 1
    stages = found["stages"]["0.01"]
    for name in ("criu dump to disk", "oras push", "stasis suspend, registry: store", "stasis resume, local: restore"):
        assert stages[name]["wall"] > 0
        assert stages[name]["peak"] > 1 << 20
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("stasis-bench-*"))


def test_gangs_are_locked_and_heard_of_again(tmp_path: Path) -> None:
    samples = Samples()
    gangs.locking(tmp_path, 1, samples)
    gangs.gaps(tmp_path, 1, samples)
    assert all(samples.values[name][0] > 0 for name in ("one.locked", "four.locked", "gap.usual", "gap.worse"))


def test_one_changed_bit_of_a_process_is_noticed(tmp_path: Path) -> None:
    with Subject("quantized", GIB // 256, tmp_path) as subject:
        subject.check()
        subject.ask("spoil")
        with pytest.raises(Corrupt, match="other bytes"):
            subject.check()
