"""Gangs of the light trainer in real containers, for the tests of this folder."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.gang.lab import Lab, left_behind

NUMBERS = itertools.count()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """Makes gangs: `lab(ranks=2)`. All are deleted at the end, and nothing of them may be left."""
    made: list[Lab] = []

    def make(ranks: int = 2, **options: object) -> Lab:
        name = f"g{os.getpid()}x{next(NUMBERS)}"
        made.append(Lab(name, tmp_path / name, ranks, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
    found = [thing for one in made for thing in left_behind(one.name)]
    for one in made:
        shutil.rmtree(one.folder, ignore_errors=True)
    assert not found
