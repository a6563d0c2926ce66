"""The lock of a gang's network: what it drops, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.network.lab import Bridge, Pod

from stasis.agent.network import lock, nft
from stasis.core.connections import FourTuple, address
from stasis.errors import StasisError

pytestmark = pytest.mark.root

# Serves TCP and UDP echo on port 7 of every address, IPv4 and IPv6 (IPv4 as mapped addresses).
SERVER = """
import os, select, socket
tcp = socket.create_server(("::", 7), family=socket.AF_INET6, dualstack_ipv6=True)
udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
udp.bind(("::", 7))
print("ready", flush=True)
open_ = []
while True:
    for s in select.select([tcp, udp, *open_], [], [])[0]:
        if s is tcp:
            open_.append(tcp.accept()[0])
        elif s is udp:
            udp.sendto(*udp.recvfrom(100))
        else:
            data = s.recv(100)
            s.sendall(data) if data else open_.remove(s)
"""
ASK = """
import socket, sys
kind = socket.SOCK_STREAM if sys.argv[1] == "tcp" else socket.SOCK_DGRAM
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET, kind)
s.settimeout(0.4)
try:
    s.connect((sys.argv[2], 7))
    s.send(b"hello")
    print(s.recv(5).decode())
except OSError as error:
    print("silence")
"""


def addresses(host: int) -> list[str]:
    return [f"10.99.0.{host}", f"fd99::{host}"]


@pytest.fixture
def pods() -> Iterator[list[Pod]]:
    """Ranks 1 and 2 and an outsider 3, on one switch, each serving echo."""
    switch, pods, servers = Bridge(), [], []
    try:
        for host in (1, 2, 3):
            pods.append(Pod(switch, addresses(host)))
            command = pods[-1].enter(sys.executable, "-c", SERVER)
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            assert servers[-1].stdout
            assert servers[-1].stdout.readline() == b"ready\n"
        yield pods
    finally:
        for server in servers:
            server.kill()
            server.wait()
        for pod in pods:
            pod.close()
        switch.close()


def ask(pod: Pod, to: str, kind: str = "tcp") -> str:
    return pod.python(ASK, kind, to).strip()


GANG = [address(a) for host in (1, 2) for a in addresses(host)]


def test_gang_members_cannot_reach_each_other_and_all_else_can(pods: list[Pod]) -> None:
    rank, peer, outsider = pods
    lock.lock(rank.netns_fd, GANG)
    for here, mine in zip(addresses(2), addresses(1), strict=True):
        assert ask(rank, here) == "silence"
        assert ask(peer, mine) == "silence"
        assert ask(rank, here, "udp") == "hello"
        assert ask(peer, mine, "udp") == "hello"
    assert ask(rank, "::ffff:10.99.0.2") == "silence"
    for theirs, mine in zip(addresses(3), addresses(1), strict=True):
        assert ask(rank, theirs) == "hello"
        assert ask(outsider, mine) == "hello", "a probe"
        assert ask(rank, mine) == "hello", "a sidecar, by the pod's own address"
    assert ask(rank, "127.0.0.1") == "hello"
    assert ask(rank, "::1") == "hello"


def test_unlock_lets_the_gang_go_on_and_can_be_repeated(pods: list[Pod]) -> None:
    rank, _, _ = pods
    lock.unlock(rank.netns_fd)
    assert not lock.is_locked(rank.netns_fd)
    lock.lock(rank.netns_fd, GANG)
    lock.lock(rank.netns_fd, GANG)
    assert lock.is_locked(rank.netns_fd)
    lock.unlock(rank.netns_fd)
    assert not lock.is_locked(rank.netns_fd)
    lock.unlock(rank.netns_fd)
    assert [ask(rank, a) for a in addresses(2)] == ["hello", "hello"]


def test_single_connections_are_locked_also_over_lo_and_to_outsiders(pods: list[Pod]) -> None:
    rank, _, outsider = pods
    code = """
import socket, sys
held = []
for name, port in (("127.0.0.1", 40001), ("::1", 40002), (sys.argv[1], 40003), (sys.argv[1], 40004)):
    s = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
    s.settimeout(0.5)
    s.bind(("", port))
    s.connect((name, 7))
    held.append(s)
print("connected", flush=True)
sys.stdin.readline()
for s in held:
    try:
        s.send(b"hello")
        print(s.recv(5).decode(), flush=True)
    except OSError:
        print("silence", flush=True)
"""
    theirs, mine = addresses(3)[0], addresses(1)[0]
    client = subprocess.Popen(
        rank.enter(sys.executable, "-c", code, theirs), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout
    try:
        assert client.stdout.readline() == "connected\n"
        tuples = [("127.0.0.1", 40001, "127.0.0.1", 7), ("::1", 40002, "::1", 7), (mine, 40003, theirs, 7)]
        connections = [FourTuple(address(a), p, address(b), q) for a, p, b, q in tuples]
        lock.lock(rank.netns_fd, [], connections)
        assert client.communicate("\n")[0].split() == ["silence", "silence", "silence", "hello"]
    finally:
        client.kill()
        client.wait()
    assert ask(rank, theirs) == ask(outsider, mine) == "hello"


def test_a_refused_command_carries_nfts_own_words(pods: list[Pod]) -> None:
    with pytest.raises(StasisError, match=r"No such file or directory.*\n?.*nowhere"):
        nft.run(pods[0].netns_fd, "list table inet nowhere")


def test_a_kept_context_stays_in_its_namespace(pods: list[Pod]) -> None:
    with nft.Nft(pods[0].netns_fd) as first, nft.Nft(pods[1].netns_fd) as second:
        first.run("add table inet only_here")
        assert "only_here" in first.run("list tables")
        assert "only_here" not in second.run("list tables")
    assert "only_here" not in subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout
