from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.network.lab import Bridge, Gang, SlowSwitch, bundle, run

from stasis.agent.criu_images import ImageCodec


@pytest.fixture(scope="session")
def codec() -> ImageCodec:
    return ImageCodec(bundle() / "images.desc")


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("load") / "load"
    run("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, Path(__file__).with_name("load.c"))
    return program


StartGang = Callable[..., Gang]


@pytest.fixture
def start_gang(tmp_path: Path, load: Path) -> Iterator[StartGang]:
    """Starts gangs of the load program: `start_gang(spec, addresses, delay=seconds)`."""
    gangs: list[Gang] = []

    def start(spec: str, addresses: list[str], *, delay: float = 0.0) -> Gang:
        folder = tmp_path / f"gang{len(gangs)}"
        folder.mkdir()
        gang = Gang(folder, spec, addresses, SlowSwitch(delay) if delay else Bridge())
        gangs.append(gang)
        gang.start(load)
        return gang

    yield start
    for gang in gangs:
        gang.close()
