"""A peer that puts its acknowledgement off gives it when it is asked."""

from __future__ import annotations

import os
import socket

import pytest

from stasis.agent.network.sockets import TcpSocket, TcpSockets

pytestmark = [pytest.mark.root]


def test_a_probed_peer_acknowledges_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted, TcpSockets([os.getpid()]) as sockets:
            ours = next(s for s in sockets if s.ends and s.ends.local_port == client.getsockname()[1])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            while not unread(client, accepted, ours):
                pass
            ours.probe()
            assert ours.in_flight == 0
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def unread(client: socket.socket, peer: socket.socket, ours: TcpSocket) -> bool:
    """Send what the peer, which answers and so saves acknowledgements, does not read; whether it is in flight yet."""
    for _ in range(4):
        client.send(b"question")
        peer.recv(64)
        peer.send(b"answer")
        client.recv(64)
    client.send(b"not read")
    return ours.in_flight > 0
