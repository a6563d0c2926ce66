"""libnftables ends the process at a descriptor from 1024 on: who holds many leaves it the lower ones."""

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from stasis.agent.descriptors import SELECT_LIMIT
from stasis.agent.network import nft
from stasis.agent.network.sockets import TcpSockets
from stasis.agent.pipes import Held
from stasis.errors import ResourceShort

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def many() -> Iterator[None]:
    """As many descriptors as an agent may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def descriptors() -> set[int]:
    listing = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in listing if os.path.lexists(f"/proc/self/fd/{fd}")}  # not the one of the listing


def test_held_pages_leave_the_lower_ones() -> None:
    before = descriptors()
    held = Held()
    for _ in range(3):
        read, write = os.pipe()
        os.write(write, bytes(4096))
        os.close(write)
        held.take(read)
    more = descriptors() - before
    assert len(more) == 3
    assert min(more) >= SELECT_LIMIT
    assert b"".join(bytes(piece) for piece in held.pieces()) == bytes(3 * 4096)
    assert descriptors() == before


def test_sockets_of_a_tree_leave_the_lower_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)), TcpSockets([os.getpid()]) as sockets:
        numbers = [one.socket.fileno() for one in sockets]
    assert numbers
    assert min(numbers) >= SELECT_LIMIT


def test_without_a_lower_one_nft_is_refused_and_the_agent_lives() -> None:
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(SELECT_LIMIT)]
    netns = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        with pytest.raises(ResourceShort, match="too many open"):
            nft.run(netns, "list tables")
        os.close(opened.pop(0))
        os.close(opened.pop(0))
        nft.run(netns, "list tables")
    finally:
        for fd in (*opened, netns):
            os.close(fd)
