"""Ten thousand schedules of faults break no invariant, and come to every pair of state and event."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.mutants import ThawsUnrecorded
from tests.sim.parties import Plants
from tests.sim.run import COMMAND, Summary, one, run
from tests.sim.setting import Setting
from tests.sim.simulation import Simulation

from stasis.core.records import Verdict
from stasis.core.steps import Step

ROOT = Path(__file__).parents[2]
ALWAYS = 100_000  # an event that never comes

# What random schedules come to too rarely for ten thousand of them.
DIRECTED: tuple[Setting, ...] = (
    Setting(program="SR", triggers={Step.LAY: ["crash-agent"], Verdict.RESTORED: ["second-leader"]}, calm=ALWAYS),
    Setting(
        program="SR",
        triggers={Step.LAY: ["crash-agent"], Verdict.ABANDONED: ["second-leader", "withdraw"]},
        loss=0.2,
        delay=1.0,
        calm=ALWAYS,
    ),
    Setting(program="SR", triggers={Verdict.COMMIT: ["delete"]}, store=0.3, calm=ALWAYS),
    Setting(program="SR", triggers={Verdict.COMMIT: ["withdraw"]}, store=0.3, calm=ALWAYS),
    Setting(program="S", triggers={Verdict.COMMIT: ["exit", "exit", "crash-leader"]}, loss=0.3, calm=ALWAYS),
    Setting(program="S", triggers={Verdict.COMMIT: ["kill-guardian", "crash-leader"]}, store=0.3, calm=ALWAYS),
    Setting(program="SR", triggers={Verdict.RESTORED: ["exit", "delete"]}, calm=ALWAYS),
    Setting(program="S", triggers={Step.SAVE_DEVICES: ["jump", "jump"]}, hang=0.1, calm=ALWAYS),
)


def copy(setting: Setting) -> Setting:
    """Schedules use their triggers up."""
    return Setting(**{**vars(setting), "triggers": {what: list(faults) for what, faults in setting.triggers.items()}})


def describe(summary: Summary) -> str:
    return "\n".join(f"{what.rstrip()}\n  {COMMAND.format(seed=seed)}" for seed, what in summary.failures)


@pytest.mark.timeout(600)
def test_ten_thousand_schedules_break_nothing_and_come_everywhere() -> None:
    summary = run(0, 10_000, 2)
    for setting in DIRECTED:
        for seed in range(100):
            one(seed, summary, copy(setting))
    assert not summary.failures, describe(summary)
    assert summary.schedules == 10_000 + 100 * len(DIRECTED)
    assert summary.missing() == []


def test_a_seed_replays_alone() -> None:
    def trace(seed: int) -> list[str]:
        lines: list[str] = []
        Simulation(seed, trace=lines.append).run()
        return lines

    assert trace(4711) == trace(4711)
    assert trace(4711) != trace(4712)


def test_the_command_for_a_seed_traces_it() -> None:
    command = COMMAND.format(seed=4711).replace("python", sys.executable)
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines: list[str] = []
    Simulation(4711, trace=lines.append).run()
    assert done.stdout.splitlines()[: len(lines)] == lines


def test_a_violation_is_told_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planted(Simulation):
        def __init__(self, seed: int, setting: Setting | None = None, **options: object) -> None:
            super().__init__(seed, Setting(program="SR"), plants=Plants(coordinator=ThawsUnrecorded))

    monkeypatch.setattr("tests.sim.run.Simulation", Planted)
    summary = Summary()
    one(7, summary)
    assert [seed for seed, _ in summary.failures] == [7]
    assert "--seed 7 " in describe(summary)
    assert "one place" in describe(summary)
