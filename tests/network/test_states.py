"""Connections that are not simply established: half closed, reset, asking, full, within one rank, not yet accepted."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network import cycle
from tests.network.lab import Bridge, Gang, Pod, eventually

from stasis.agent.criu_images import ImageCodec
from stasis.agent.network import diag, nft
from stasis.agent.network.sockets import TcpSockets
from stasis.core.connections import address

pytestmark = [pytest.mark.root, pytest.mark.criu]

STATES = Path(__file__).with_name("states.py")


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    gang = Gang(tmp_path, "", [], Bridge())
    yield gang
    gang.close()


def pods(gang: Gang, addresses: list[str]) -> list[Pod]:
    gang.addresses = addresses
    for a in addresses:
        gang.pods.append(Pod(gang.switch, [a]))
    return gang.pods


def dropping(pod: Pod, rule: str) -> None:
    nft.run(pod.netns_fd, nft.table("inet dropping", nft.chain("input", "filter", "input", 0, [rule])))


@pytest.mark.parametrize("addresses", [["10.99.0.1", "10.99.0.2"], ["fd99::1", "fd99::2"]])
def test_every_state_of_a_connection_survives(gang: Gang, codec: ImageCodec, addresses: list[str]) -> None:
    logs = [gang.folder / "client", gang.folder / "server"]
    client, server = pods(gang, addresses)
    nft.run(
        server.netns_fd,
        "table inet refuse {\nchain i {\ntype filter hook input priority 0;\ntcp dport 7001 drop\n}\n}\n",
    )
    server.start(sys.executable, STATES, "server", addresses[1], gang.folder, log=logs[1])
    time.sleep(0.3)
    client.start(sys.executable, STATES, "client", addresses[1], gang.folder, log=logs[0])
    eventually(lambda: all(log.read_text() == "ready\n" for log in logs), "both are ready")
    captured = cycle.capture(gang, codec, "dump")
    assert not any(captured.mended.outside.values())
    states = {c.state.name for table in captured.connections.values() for c in table}
    assert {"ESTABLISHED", "FIN_WAIT1", "FIN_WAIT2", "CLOSE_WAIT", "SYN_SENT", "CLOSE"} <= states, states
    cycle.resume(gang, captured)
    (gang.folder / "go").touch()
    eventually(lambda: all(not pod.tasks() for pod in gang.pods), "both end", 30)
    for log in logs:
        lines = log.read_text().splitlines()
        assert not [line for line in lines if "WRONG" in line]
        assert lines[-1] == "done", lines


PATIENT = """
import os, socket, sys, time
if sys.argv[1] == "server":
    held = socket.create_server(("10.99.0.1", 7000)).accept()
else:
    s = socket.create_connection(("10.99.0.1", 7000))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        s.setsockopt(socket.IPPROTO_TCP, option, 1)
print("ready", flush=True)
while not os.path.exists(sys.argv[2] + "/go"):
    time.sleep(0.02)
if sys.argv[1] == "server":
    held[0].sendall(held[0].recv(5))
else:
    s.sendall(b"hello")
    print(s.recv(5).decode(), s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), end=" ")
    print(s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), flush=True)
"""


@pytest.mark.parametrize("goes_on", [True, False])
def test_timeouts_do_not_kill_a_locked_connection_and_are_kept(gang: Gang, codec: ImageCodec, goes_on: bool) -> None:
    logs = [gang.folder / "server", gang.folder / "client"]
    for pod, log in zip(pods(gang, ["10.99.0.1", "10.99.0.2"]), logs, strict=True):
        pod.start(sys.executable, "-c", PATIENT, log.name, gang.folder, log=log)
        time.sleep(0.3)
    eventually(lambda: all(log.read_text() == "ready\n" for log in logs), "both are ready")
    if goes_on:
        with cycle.quiet(gang):
            time.sleep(3.5)
    else:
        cycle.resume(gang, cycle.capture(gang, codec, "dump"))
    (gang.folder / "go").touch()
    eventually(lambda: logs[1].read_text() == "ready\nhello 300 1\n", "the answer, and the options as they were")


UNACCEPTED = """
import socket, time
listener = socket.create_server(("10.99.0.1", 7000))
print("ready", flush=True)
time.sleep(1000)
"""
CLIENT = """
import socket, time
s = socket.create_connection(("10.99.0.1", 7000))
s.send(b"hello")
print("ready", flush=True)
time.sleep(1000)
"""
CLOSED = """
import socket, time
s = socket.create_connection(("10.99.0.1", 7000))
s.setblocking(False)
try:
    while True:
        s.send(bytes(65536))
except BlockingIOError:
    pass
s.close()
print("ready", flush=True)
time.sleep(1000)
"""
ACCEPTED = UNACCEPTED.replace('print("ready"', 'print("ready", flush=True); held = listener.accept(); print(""')


NO_ACK = "tcp dport 7000 tcp flags & syn == 0 drop"


@pytest.mark.parametrize(
    ("server", "client", "rank", "drop", "cause"),
    [
        (UNACCEPTED, CLIENT, 0, NO_ACK, "is being opened"),
        (UNACCEPTED, CLIENT, 0, "", "has not accepted it yet"),
        (ACCEPTED, CLOSED, 1, "", "has closed it, [0-9]+ bytes are still to be delivered"),
    ],
)
def test_what_no_process_holds_is_found_and_named(
    gang: Gang, server: str, client: str, rank: int, drop: str, cause: str
) -> None:
    """CRIU would leave these out, and the other end would lose data or wait for ever."""
    dropping(pods(gang, ["10.99.0.1", "10.99.0.2"])[0], drop)
    for pod, program in zip(gang.pods, (server, client), strict=True):
        log = gang.folder / f"log{len(list(gang.folder.iterdir()))}"
        pod.start(sys.executable, "-c", program, log=log)
        eventually(lambda log=log: "ready" in log.read_text(), "ready")
        time.sleep(0.1)
    for pod in gang.pods:
        pod.set_frozen(True)
    ranks = [TcpSockets(pod.tasks()) for pod in gang.pods]
    found = [
        diag.unsettled(pod.netns_fd, cycle.gang_addresses(gang), r.listening())
        for pod, r in zip(gang.pods, ranks, strict=True)
    ]
    for r in ranks:
        r.close()
    assert len(found[rank]) == 1
    assert not found[1 - rank]
    finding = found[rank][0]
    assert "10.99.0.1:7000" in finding.where
    assert "10.99.0.2" in finding.where
    assert re.search(cause, finding.cause)


def test_an_outsider_that_was_not_accepted_is_left_out(gang: Gang, codec: ImageCodec) -> None:
    """A probe of the kubelet's is such a one: it must not hinder a checkpoint."""
    rank, outsider = pods(gang, ["10.99.0.1", "10.99.0.9"])
    rank.start(sys.executable, "-c", UNACCEPTED, log=gang.folder / "rank")
    eventually(lambda: "ready" in (gang.folder / "rank").read_text(), "ready")
    outsider.start(sys.executable, "-c", CLIENT, log=gang.folder / "outsider")
    eventually(lambda: "ready" in (gang.folder / "outsider").read_text(), "connected")
    rank.set_frozen(True)
    with TcpSockets(rank.tasks()) as sockets:
        assert not diag.unsettled(rank.netns_fd, {address("10.99.0.1")}, sockets.listening())
    with pytest.raises(AssertionError, match="In-flight connection"):
        rank.dump(gang.folder / "refused")
    rank.dump(gang.folder / "dump", "--skip-in-flight")
