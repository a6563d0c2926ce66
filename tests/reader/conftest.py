"""A checkpoint in a folder and in a real registry, and readers of it that are all gone in the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.reader.checkpoint import streams, write
from tests.registry.conftest import Registry, make_registry, registry

from stasis.agent import provision
from stasis.agent.criu_images import ImageCodec
from stasis.agent.reader.client import Reader
from stasis.store.connect import open_repository

__all__ = ["make_registry", "registry"]

StartReader = Callable[..., Reader]


@pytest.fixture(scope="session")
def codec() -> ImageCodec:
    return ImageCodec(provision.criu() / "images.desc")


@pytest.fixture(scope="session")
def content(codec: ImageCodec) -> dict[str, bytes]:
    return streams(codec)


@pytest.fixture(scope="session")
def folder(content: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Reference and digest of the manifest. The folder is root's alone."""
    path = tmp_path_factory.mktemp("reader") / "store"
    return str(path), write(open_repository(path), content)


@pytest.fixture(params=["folder", pytest.param("registry", marks=pytest.mark.registry)])
def stored(request: pytest.FixtureRequest, folder: tuple[str, str], content: dict[str, bytes]) -> tuple[str, str]:
    """The same in either kind of repository."""
    if request.param == "folder":
        return folder
    server: Registry = request.getfixturevalue("registry")
    where = f"{server.host}/gang"
    return where, write(open_repository(where), content)


@pytest.fixture
def start() -> Iterator[StartReader]:
    started: list[Reader] = []

    def make(where: tuple[str, str], **options: float) -> Reader:
        started.append(Reader(provision.criu(), *where, **options))
        return started[-1]

    yield make
    for reader in started:
        reader.close()
    assert not [reader.pid for reader in started if os.path.exists(f"/proc/{reader.pid}")]


def until(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class Taken:
    """What comes out of pipes, read by threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(16)

    def pipe(self, most: int | None = None) -> tuple[int, Future[bytes]]:
        """The write end, and what is read from the other, which is closed after `most` bytes."""
        read, write = os.pipe()

        def take() -> bytes:
            data = bytearray()
            with open(read, "rb", buffering=0) as source:
                while (most is None or len(data) < most) and (piece := source.read(1 << 20)):
                    data += piece
            return bytes(data)

        return write, self._pool.submit(take)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def taken() -> Iterator[Taken]:
    taken = Taken()
    yield taken
    taken.close()
