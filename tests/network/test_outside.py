"""Connections to peers outside the gang: closed at the restore, so that the program sees an error at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network import cycle
from tests.network.lab import Bridge, Gang, Pod, eventually

from stasis.agent.criu_images import ImageCodec
from stasis.agent.network import diag
from stasis.core.connections import FourTuple, address

pytestmark = [pytest.mark.root, pytest.mark.criu]

# Waits for an answer that never comes, in IPv4, IPv6 and IPv4 through an IPv6 socket; then says what it got.
CLIENT = """
import os, selectors, socket, sys
wait = selectors.DefaultSelector()
for where in ("10.99.0.9", "fd99::9", "::ffff:10.99.0.9"):
    s = socket.create_connection((where, 7000)) if "::ffff" not in where else socket.socket(socket.AF_INET6)
    if "::ffff" in where:
        s.connect((where, 7000))
    wait.register(s, selectors.EVENT_READ, where)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.connect(("10.99.0.9", 7000))
print("ready", flush=True)
while wait.get_map():
    for key, _ in wait.select():
        try:
            print(key.data, key.fileobj.recv(100), flush=True)
        except OSError as error:
            print(key.data, error.strerror, flush=True)
        wait.unregister(key.fileobj)
print("udp", udp.getpeername()[1], flush=True)
"""
SILENT = """
import socket, time
a = socket.create_server(("::", 7000), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
held = [a.accept() for _ in range(3)]
print("ready", flush=True)
time.sleep(1000)
"""
ADDRESSES = ["10.99.0.1", "fd99::1"]


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    gang = Gang(tmp_path, "", ADDRESSES, Bridge())
    yield gang
    gang.close()


@pytest.fixture
def outsider(gang: Gang) -> Iterator[Pod]:
    pod = Pod(gang.switch, ["10.99.0.9", "fd99::9"])
    yield pod
    pod.close()


def test_a_client_of_a_silent_outsider_gets_an_error_at_once(gang: Gang, outsider: Pod, codec: ImageCodec) -> None:
    outsider.start(sys.executable, "-c", SILENT, log=gang.folder / "silent")
    gang.pods.append(Pod(gang.switch, ADDRESSES))
    log = gang.folder / "log"
    gang.pods[0].start(sys.executable, "-c", CLIENT, log=log)
    eventually(lambda: log.read_text() == "ready\n", "the client waits")
    captured = cycle.capture(gang, codec, "dump")
    assert {str(c.remote) for c in captured.mended.outside[0]} == {"10.99.0.9", "fd99::9"}
    outsider.close()  # nothing answers any more, not even its kernel
    gang.addresses = ["10.99.0.1"]
    gang.pods[:] = [Pod(gang.switch, ADDRESSES)]
    gang.pods[0].restore(captured.folders[0])
    cycle.release(gang, captured)
    eventually(lambda: "udp" in log.read_text(), "the client has got its errors", 5)
    lines = sorted(log.read_text().splitlines())
    assert lines == [
        "10.99.0.9 Software caused connection abort",
        "::ffff:10.99.0.9 Software caused connection abort",
        "fd99::9 Software caused connection abort",
        "ready",
        "udp 7000",
    ]


def test_only_what_is_named_is_destroyed(gang: Gang, outsider: Pod) -> None:
    """A sidecar's connections to the same peer live on."""
    pod = Pod(gang.switch, ADDRESSES)
    gang.pods.append(pod)
    server = subprocess.Popen(outsider.enter(sys.executable, "-c", SILENT), stdout=subprocess.PIPE)
    assert server.stdout
    assert server.stdout.readline() == b"listening\n"
    client = subprocess.Popen(pod.enter(sys.executable, "-c", CLIENT), stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout
        assert client.stdout.readline() == "ready\n"
        tuples = [s.ends for s in diag.listed(pod.netns_fd)]
        assert len(tuples) == 3
        one = next(t for t in tuples if t.remote == address("fd99::9"))
        gone = FourTuple(address("10.99.0.1"), 1, address("10.99.0.9"), 7000)
        assert diag.destroy(pod.netns_fd, [one, gone]) == 1
        assert client.stdout.readline() == "fd99::9 Software caused connection abort\n"
        assert {s.ends for s in diag.listed(pod.netns_fd)} == set(tuples) - {one}
    finally:
        for process in (client, server):
            process.kill()
            process.wait()
