"""Machines with simulated GPUs, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.gpusim.machine import Machine

MakeMachine = Callable[..., Machine]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[MakeMachine]:
    """Makes machines: `machines(["H100", "A100"])`."""
    made: list[Machine] = []

    def make(*arguments: object, **options: object) -> Machine:
        made.append(Machine(tmp_path / f"machine{len(made)}", *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def machine(machines: MakeMachine) -> Machine:
    return machines()
