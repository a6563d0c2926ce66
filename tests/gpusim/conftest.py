"""Machines with simulated GPUs, for the tests of this folder."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.gang.lab import left_behind
from tests.gpusim.lab import GpuLab
from tests.gpusim.machine import Machine

MakeMachine = Callable[..., Machine]
MakeGang = Callable[..., GpuLab]
MACHINE = ("mib", "bandwidth", "driver")  # options of a machine
NUMBERS = itertools.count()


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


@pytest.fixture
def gangs(tmp_path: Path, machines: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGang]:
    """Makes gangs, each on a machine of its own: `gangs(["H100", "H100"], ranks=2)`. See `GpuLab`."""
    made: list[GpuLab] = []

    def make(*arguments: object, **options: object) -> GpuLab:
        machine = machines(*arguments, **{key: options.pop(key) for key in MACHINE if key in options})
        for name, value in machine.env.items():
            monkeypatch.setenv(name, value)
        name = f"gpu{os.getpid()}x{next(NUMBERS)}"
        made.append(GpuLab(machine, name, tmp_path / name, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
    found = [thing for one in made for thing in left_behind(one.name)]
    for one in made:
        shutil.rmtree(one.folder, ignore_errors=True)
    assert not found
