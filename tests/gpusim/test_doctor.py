"""What `stasis doctor` says of a machine's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpusim.conftest import MakeMachine

from stasis.doctor import gpus
from stasis.doctor.check import Status


@pytest.fixture
def found(machines: MakeMachine, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def look(**options: object) -> dict[str, tuple[Status, str]]:
        for name, value in machines(["H100", "H100"], **options).env.items():
            monkeypatch.setenv(name, value)
        return {check.name: (check.status, check.found) for check in gpus.checks()}

    return look


def test_the_gpus_their_driver_and_the_way_to_it_are_told(found) -> None:  # type: ignore[no-untyped-def]
    told = found()
    assert told["driver"][0] is Status.OK
    assert "2 of NVIDIA H100" in told["driver"][1]
    assert told["other GPUs"][0] is Status.OK


def test_an_old_driver_is_told_with_what_it_lacks(found) -> None:  # type: ignore[no-untyped-def]
    assert found(driver="570.86.10")["other GPUs"][0] is Status.WARN
    status, text = found(driver="550.54.15")["driver"]
    assert status is Status.WARN
    assert "has no lock and checkpoint actions" in text


def test_a_machine_without_any_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STASIS_NVIDIA_PROC", str(tmp_path))
    assert list(gpus.checks()) == []
