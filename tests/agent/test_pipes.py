"""Streams give back exactly the bytes that went in, however a writer cut them."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stasis.agent.pipes import Buffers, Copied, Held, Spilled, Stream


def make(kind: str, folder: Path) -> Stream:
    return {"held": Held, "copied": lambda: Copied(Buffers()), "spilled": lambda: Spilled(folder)}[kind]()


def through(stream: Stream, pieces: list[bytes]) -> bytes:
    read, write = os.pipe()

    def feed() -> None:
        with os.fdopen(write, "wb", buffering=0) as pipe:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[pipe.write(view) :]

    feeder = threading.Thread(target=feed)
    feeder.start()
    stream.take(read)
    feeder.join()
    return b"".join(bytes(piece) for piece in stream.pieces())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["held", "copied", "spilled"])
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 7, 4095, 4096, 4097, 65536, 1_000_003]), max_size=8))
def test_bytes_survive(kind: str, sizes: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    pieces = [os.urandom(size) for size in sizes]
    before = descriptors()
    stream = make(kind, tmp_path_factory.getbasetemp())
    assert through(stream, pieces) == b"".join(pieces)
    assert stream.size == sum(sizes)
    stream.close()
    assert descriptors() == before


def test_many_small_writes_fill_a_pipe_before_its_bytes_do() -> None:
    """A slot holds a write, not a page: 3000 writes of one byte each must not block for ever."""
    assert through(Held(), [bytes([i % 256]) for i in range(3000)]) == bytes(i % 256 for i in range(3000))


def test_a_stream_that_is_not_read_leaves_nothing_open() -> None:
    before = descriptors()
    stream = Held()
    read, write = os.pipe()
    os.write(write, b"x" * 5000)
    os.close(write)
    stream.take(read)
    stream.close()
    assert descriptors() == before


def test_buffers_are_used_again() -> None:
    buffers = Buffers()
    buffers.reserve(1)
    for _ in range(3):
        assert through(Copied(buffers), [b"a" * 100_000]) == b"a" * 100_000
    assert len(buffers._free) == 1
