"""One API server for all tests of this folder, and gangs with a daemon each."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.daemon.lab import Lab
from tests.gang.lab import left_behind
from tests.support.apiserver import ApiServer, serving

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with serving(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def lab(tmp_path: Path, api: ApiServer) -> Iterator[Callable[..., Lab]]:
    """Makes gangs of two ranks: `lab()`. All are deleted at the end, and nothing of them may be left."""
    made: list[Lab] = []

    def make(**options: int) -> Lab:
        name = f"d{os.getpid()}x{next(NUMBERS)}"
        made.append(Lab(name, tmp_path / name, api, **options))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()
    found = [thing for one in made for thing in left_behind(one.name)]
    for one in made:
        shutil.rmtree(one.folder, ignore_errors=True)
    assert not found
