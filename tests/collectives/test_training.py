"""Jobs checkpointed at random instants, groups torn down and rebuilt elsewhere, print what undisturbed ones print."""

import os
from pathlib import Path

import pytest
from tests.collectives import lab

pytestmark = pytest.mark.root
TRIGGERS = int(os.environ.get("STASIS_TRIGGERS", "0"))  # more than the default, by hand

QUICK = [
    # job, torch, ranks, steps, triggers, environment
    ("ddp", "oldest", 2, 60, 8, {}),
    ("fsdp1", "oldest", 2, 40, 8, {}),
    ("fsdp2", "oldest", 2, 40, 8, {}),
    ("operations", "oldest", 3, 8, 8, {}),
]
LONG = [
    (job, torch, ranks, steps, 60, environment)
    for torch in ("oldest", "newest")
    for job, ranks, steps, environment in (
        ("ddp", 2, 800, {}),
        ("ddp", 4, 400, {}),
        ("fsdp1", 2, 300, {}),
        ("fsdp2", 2, 200, {}),
        ("fsdp2", 4, 120, {"TP": "2"}),
        ("operations", 3, 60, {}),
        ("operations", 4, 40, {}),
        ("compiled", 2, 300, {}),
    )
]


def name(case: object) -> str:
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)


def check(folder: Path, job: str, torch: str, ranks: int, steps: int, triggers: int, more: dict[str, str]) -> None:
    with lab.gang(folder / "undisturbed", job, torch, ranks, steps, active=False, **more) as gang:
        undisturbed = gang.wait(240)
    with lab.gang(folder / "disturbed", job, torch, ranks, steps, **more) as gang:
        gang.expect_lines(1)
        lab.disturb(gang, TRIGGERS or triggers, seed=steps)
        assert gang.wait(240) == undisturbed
        report(f"{job} x{ranks} {torch}{more or ''}", gang)


def report(job: str, gang: lab.Gang) -> None:
    print(f"{job}: {gang.figures}")
    assert gang.figures.rebuild
    assert gang.figures.sockets == []


@pytest.mark.parametrize("case", QUICK, ids=name)
def test_disturbed_run_equals_the_undisturbed_one(case: tuple, tmp_path: Path) -> None:
    check(tmp_path, *case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LONG, ids=name)
def test_disturbed_run_equals_the_undisturbed_one_often(case: tuple, tmp_path: Path) -> None:
    check(tmp_path, *case)


@pytest.mark.parametrize(
    ("torch", "steps", "triggers"),
    [
        ("oldest", 60, 6),
        pytest.param("oldest", 600, 40, marks=pytest.mark.slow),
        pytest.param("newest", 600, 40, marks=pytest.mark.slow),
    ],
)
def test_torchrun_and_its_agent_are_rebuilt_too(torch: str, steps: int, triggers: int, tmp_path: Path) -> None:
    with lab.torchrun(tmp_path / "undisturbed", "ddp", torch, 2, steps, active=False) as gang:
        undisturbed = gang.wait(240)
    with lab.torchrun(tmp_path / "disturbed", "ddp", torch, 2, steps) as gang:
        gang.expect_lines(1)
        lab.disturb(gang, triggers, seed=2)
        assert gang.wait(240) == undisturbed
        report(f"torchrun {torch}", gang)
