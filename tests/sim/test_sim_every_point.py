"""One fault at every point: each process dies instead of each of its effects, each message is lost or comes twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sim.setting import Setting, timing
from tests.sim.simulation import Simulation

from stasis.core.plan import Outcome

# Seconds that outlast any take-over here, so that only what a fault makes impossible fails.
PATIENT = timing(frozen=200, step=80)
GOOD = {Outcome.CONTINUED, Outcome.RELEASED, Outcome.RESTORED}


def outcomes(setting: Setting) -> tuple[Simulation, list[str]]:
    simulation = Simulation(1, setting)
    result = simulation.run()
    assert result.violation is None, f"{setting}: {result.violation}"
    return simulation, [outcome.split(":")[1] for outcome in result.outcomes]


def deaths(process: str, program: str, *, devices: bool = False) -> Iterator[tuple[int, list[str]]]:
    """What becomes of a program whose process dies instead of its n-th effect, for every n that it comes to."""
    for effect in range(1000):
        setting = Setting(2, program, devices, PATIENT, fuse=(process, effect))
        simulation, ends = outcomes(setting)
        if not simulation.deaths:
            assert effect > 3, f"{process} does nothing"
            return
        yield effect, ends
    pytest.fail(f"{process} has effects without end")


def test_a_leader_that_dies_anywhere_spoils_nothing() -> None:
    for effect, ends in deaths("leader 1", "CSR"):
        assert set(ends) <= GOOD, f"effect {effect}: {ends}"


@pytest.mark.parametrize("devices", [False, True])
def test_an_agent_that_dies_anywhere_spoils_at_most_its_operation(devices: bool) -> None:
    for effect, ends in deaths("agent start#0", "CCSR", devices=devices):
        assert len([end for end in ends if end not in GOOD]) <= 1, f"effect {effect}: {ends}"
        assert ends[-1] in GOOD or ends == ["continued", "continued", "aborted"], f"effect {effect}: {ends}"


def test_an_agent_that_dies_anywhere_in_a_restore_delays_it() -> None:
    for effect, ends in deaths("agent op2#0", "SRS"):
        assert ends[-1] in GOOD or ends == ["released", "restored", "aborted"], f"effect {effect}: {ends}"
        assert len([end for end in ends if end not in GOOD]) <= 1, f"effect {effect}: {ends}"
        assert "restored" in ends, f"effect {effect}: {ends}"


def test_a_guardian_that_dies_anywhere_spoils_nothing() -> None:
    for effect in range(4):
        _, ends = outcomes(Setting(2, "CSR", timing=PATIENT, fuse=("guardian start#0", effect)))
        assert set(ends) <= GOOD, f"effect {effect}: {ends}"


def test_a_message_lost_anywhere_spoils_nothing() -> None:
    for number in range(1, messages() + 1):
        _, ends = outcomes(Setting(2, "CSR", timing=PATIENT, drop=number))
        assert set(ends) <= GOOD, f"message {number}: {ends}"


def test_a_message_that_comes_again_late_spoils_nothing() -> None:
    for number in range(1, messages() + 1):
        _, ends = outcomes(Setting(2, "CSR", timing=PATIENT, double_late=number))
        assert set(ends) <= GOOD, f"message {number}: {ends}"


def messages() -> int:
    calm, _ = outcomes(Setting(2, "CSR", timing=PATIENT))
    assert calm.sent > 100
    return calm.sent
