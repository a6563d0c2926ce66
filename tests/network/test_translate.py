"""A gang restored under other addresses keeps its own view of them, and new connections work by old and new ones."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.network import cycle
from tests.network.conftest import StartGang
from tests.network.lab import BASE_PORT, Bridge, Gang, Pod, eventually

from stasis.agent.criu_images import ImageCodec
from stasis.agent.network import diag, translate
from stasis.core.connections import address
from stasis.errors import RestoreFailed

pytestmark = [pytest.mark.root, pytest.mark.criu]

OLD = {
    "ipv4": ["10.99.0.1", "10.99.0.2", "10.99.0.3"],
    "ipv6": ["fd99::1", "fd99::2", "fd99::3"],
    "mapped": ["::ffff:10.99.0.1", "::ffff:10.99.0.2", "::ffff:10.99.0.3"],
}

# Asks the echo at each "address port" for its own words; prints them and both addresses as this end sees them.
ASK = """
import socket, sys
kind, source, *targets = sys.argv[1:]
for to, port in zip(targets[::2], targets[1::2]):
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    s = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    s.settimeout(2)
    try:
        if source:
            s.bind((source, 0))
        s.connect((to, int(port)))
        s.send(b"hello")
        print(s.recv(5).decode(), s.getsockname()[0], s.getpeername()[0])
    except OSError as error:
        print(error)
"""
# An echo on TCP and UDP at one address; says who asked.
ECHO = """
import select, socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
tcp = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
udp = socket.socket(family, socket.SOCK_DGRAM)
udp.bind((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    for s in select.select([tcp, udp], [], [])[0]:
        if s is tcp:
            s, who = tcp.accept()
            s.send(s.recv(100))
        else:
            data, who = udp.recvfrom(100)
            udp.sendto(data, who)
        print(who[0], flush=True)
"""


def moved(old: Sequence[str], turn: int) -> list[str]:
    """Other addresses of the same network."""
    return [f"{a[:-1]}{turn}{a[-1]}" for a in old]


def ask(pod: Pod, *targets: tuple[str, int], kind: str = "tcp", source: str = "") -> list[list[str]]:
    arguments = [text for to, port in targets for text in (to.removeprefix("::ffff:"), str(port))]
    return [line.split() for line in pod.python(ASK, kind, source, *arguments).splitlines()]


@contextlib.contextmanager
def echo(pod: Pod, where: str) -> Iterator[Callable[[], str]]:
    """An echo on port 7000 of `where`. Gives a function that says who asked next."""
    command = pod.enter(sys.executable, "-c", ECHO, where, "7000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield lambda: process.stdout.readline().strip() if process.stdout else ""
        finally:
            process.kill()


@pytest.mark.parametrize("family", OLD)
def test_a_gang_moves_and_moves_again(start_gang: StartGang, codec: ImageCodec, family: str) -> None:
    gang = start_gang("bsa", OLD[family])
    for turn in (1, 2):
        time.sleep(0.2)
        captured = cycle.capture(gang, codec, f"dump{turn}")
        assert captured.in_flight == 0
        assert not any(captured.mended.outside.values())
        new = moved(gang.addresses, turn)
        gap = gang.gap_ms(cycle.resume(gang, captured, new, codec=codec))
        print(f"{family}, move {turn}: data everywhere {gap:.1f} ms after the unlock")
        plain = {address(a) for a in gang.addresses}
        for pod in gang.pods:  # the processes see the old addresses on both sides
            listed = [s.ends for s in diag.listed(pod.netns_fd) if s.inode]
            assert len(listed) == 2 * len("bsa")
            assert {e.local for e in listed} | {e.remote for e in listed} == plain
        # The ranks' own listeners are bound to their old addresses.
        targets = [(to, BASE_PORT + peer) for peer in range(3) for to in (gang.addresses[peer], new[peer])]
        for pod in gang.pods:
            assert [answer[0] for answer in ask(pod, *targets)] == ["hello"] * len(targets)
    gang.finish()


# Opens connections after the first move, by old and new address, and uses the same ones after each later move.
LATE = """
import os, socket, sys, time
role, old, folder = sys.argv[1:]
family = socket.AF_INET6 if ":" in old else socket.AF_INET
listener = socket.create_server(("", 7000), family=family, backlog=9)
held = []
for turn in (1, 2, 3):
    print("ready", flush=True)
    while not os.path.exists(f"{folder}/go{turn}"):
        time.sleep(0.02)
    if turn == 1 and role == "client":
        held = [socket.create_connection((to, 7000), 5) for to in open(f"{folder}/go1").read().split()]
    elif turn == 1:
        held = [listener.accept()[0] for _ in range(2)]
    for s in held:
        s.settimeout(10)
        s.sendall(f"{role}{turn}".encode())
    print(*(s.recv(20).decode() for s in held), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_connections_made_after_a_move_survive_the_next_ones(tmp_path: Path, codec: ImageCodec, family: str) -> None:
    """Their two ends call each other differently, and by addresses of pods that are gone."""
    gang = Gang(tmp_path, "", OLD[family][:2], Bridge())
    logs = {role: tmp_path / role for role in ("client", "server")}
    try:
        for (role, log), a in zip(logs.items(), gang.addresses, strict=True):
            gang.pods.append(Pod(gang.switch, [a]))
            gang.pods[-1].start(sys.executable, "-c", LATE, role, a, tmp_path, log=log)
        wanted = {"client": "ready\n", "server": "ready\n"}
        for turn in (1, 2, 3):
            eventually(lambda: {role: log.read_text() for role, log in logs.items()} == wanted, f"{wanted}")
            captured = cycle.capture(gang, codec, f"dump{turn}")
            assert not any(captured.mended.outside.values())
            new = moved(gang.addresses, turn)
            cycle.resume(gang, captured, new, codec=codec)
            (tmp_path / "go.part").write_text(f"{gang.addresses[1]} {new[1]}")
            (tmp_path / "go.part").rename(tmp_path / f"go{turn}")
            wanted["client"] += f"server{turn} server{turn}\n" + "ready\n" * (turn < 3)
            wanted["server"] += f"client{turn} client{turn}\n" + "ready\n" * (turn < 3)
        eventually(lambda: {role: log.read_text() for role, log in logs.items()} == wanted, f"{wanted}")
    finally:
        gang.close()


@pytest.mark.parametrize("kind", ["tcp", "udp"])
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_sockets_bound_to_old_addresses_talk_by_old_and_new_ones(family: str, kind: str) -> None:
    old, new = OLD[family][:2], moved(OLD[family][:2], 1)
    places = {address(o): address(n) for o, n in zip(old, new, strict=True)}
    with contextlib.ExitStack() as stack:
        switch = Bridge()
        stack.callback(switch.close)
        pods = [Pod(switch, [a]) for a in new]
        for pod, o in zip(pods, map(address, old), strict=True):
            stack.callback(pod.close)
            peers = {k: v for k, v in places.items() if k != o}
            translate.translate(pod.netns_fd, {o: places[o]}, peers, [], [translate.Bound(kind, o, 7000)])
        asked_by = stack.enter_context(echo(pods[1], old[1]))
        for source in ("", old[0]):
            answers = ask(pods[0], (old[1], 7000), (new[1], 7000), kind=kind, source=source)
            assert [a[0] for a in answers] == ["hello", "hello"]
            assert [asked_by(), asked_by()] == [old[0], old[0]]


@pytest.fixture
def translated(start_gang: StartGang, codec: ImageCodec) -> Gang:
    gang = start_gang("i", OLD["ipv4"][:2])
    captured = cycle.capture(gang, codec, "dump")
    cycle.resume(gang, captured, moved(gang.addresses, 1), codec=codec)
    return gang


def test_a_new_listener_is_reached_by_both_addresses(translated: Gang) -> None:
    a, b = translated.pods
    with echo(b, "0.0.0.0") as asked_by:
        assert ask(a, ("10.99.0.2", 7000), ("10.99.0.12", 7000)) == [
            ["hello", "10.99.0.1", "10.99.0.2"],
            ["hello", "10.99.0.1", "10.99.0.12"],
        ]
        assert [asked_by(), asked_by()] == ["10.99.0.11", "10.99.0.11"]


def test_an_outsider_is_reached_and_never_sees_the_old_address(translated: Gang) -> None:
    outsider = Pod(translated.switch, ["10.99.0.9"])
    try:
        with echo(outsider, "10.99.0.9") as asked_by:
            assert ask(translated.pods[0], ("10.99.0.9", 7000), source="10.99.0.1")[0][0] == "hello"
            assert asked_by() == "10.99.0.11"
        # What listens on the old address is reached by the new one, from anywhere: a probe.
        # But another pod may own the old address by now: it is not taken from it on the wire.
        by_new, by_old = ask(outsider, ("10.99.0.11", BASE_PORT), ("10.99.0.1", BASE_PORT))
        assert by_new[0] == "hello"
        assert by_old[0] != "hello"
    finally:
        outsider.close()


def test_a_program_finds_its_old_address_as_its_own(translated: Gang) -> None:
    """Many ask a datagram socket from where it would send, and hold the answer against what they knew before."""
    own = "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.connect((sys.argv[1], 9))"
    for to in ("10.99.0.2", "10.99.0.12", "10.99.0.9"):
        assert translated.pods[0].python(f"{own}; print(s.getsockname()[0])", to).strip() == "10.99.0.1"


def test_new_connections_do_not_take_the_ports_of_translated_ones(translated: Gang) -> None:
    """On the wire they would be the same connection."""
    pod = translated.pods[1]
    ports = {s.ends.local_port for s in diag.listed(pod.netns_fd) if s.inode}
    reserved = pod.python("print(open('/proc/sys/net/ipv4/ip_local_reserved_ports').read())")
    assert ports
    assert ports <= {int(p) for p in reserved.replace(",", " ").split()}


def test_translation_can_be_removed(translated: Gang) -> None:
    a, _ = translated.pods
    translate.untranslate(a.netns_fd)
    translate.untranslate(a.netns_fd)
    assert "10.99.0.1/" not in a.ip("address")
    assert "10.99.0.2" not in a.ip("route")
    assert ask(a, ("10.99.0.2", BASE_PORT + 1))[0][0] != "hello"


def test_an_old_address_that_is_another_ranks_new_one_is_refused() -> None:
    a, b, c = (address(f"10.99.0.{host}") for host in (1, 2, 3))
    translate.check({0: {a: a}, 1: {b: c}})
    with pytest.raises(RestoreFailed, match=r"10\.99\.0\.1 .* know rank 0 by, and the new one of rank 1"):
        translate.check({0: {a: c}, 1: {b: a}})
