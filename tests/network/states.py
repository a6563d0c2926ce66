"""Two programs with connections in every state that a checkpoint can meet:  states.py client|server ADDRESS FOLDER.

Each sets its ends up, prints `ready`, waits for FOLDER/go, and then finds out whether all is as TCP promises. It prints
a line per connection and `done`.
"""

import contextlib
import os
import socket
import sys
import time

role, where, folder = sys.argv[1:]
FAMILY = socket.AF_INET6 if ":" in where else socket.AF_INET
LOOPBACK = "::1" if ":" in where else "127.0.0.1"
NAMES = ["sent-and-shut", "full-and-shut", "shut-by-server", "both-shut", "reset", "timeout"]
MEGABYTE = bytes(range(256)) * 4096


def fill(s: socket.socket) -> int:
    """Write until the peer's window and our queue are full; how much that was."""
    s.setblocking(False)
    sent = 0
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            sent += s.send(MEGABYTE[sent % len(MEGABYTE) :])
    s.setblocking(True)
    return sent


def read_all(s: socket.socket) -> bytes:
    parts = []
    while part := s.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def expect(name: str, value: object, wanted: object) -> None:
    print(name, "ok" if value == wanted else f"WRONG: {value!r:.200}, not {wanted!r:.200}", flush=True)


def pattern(length: int) -> bytes:
    return (MEGABYTE * (length // len(MEGABYTE) + 1))[:length]


def within(address: str) -> tuple[socket.socket, socket.socket]:
    """A connection to ourselves."""
    with socket.create_server((address, 0), family=FAMILY) as listener:
        a = socket.create_connection(listener.getsockname()[:2])
        return a, listener.accept()[0]


def wait() -> None:
    print("ready", flush=True)
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)


def client() -> None:
    s = {name: socket.create_connection((where, 7000)) for name in NAMES}
    own = s["reset"].getsockname()[0]
    inner = {"lo": within(LOOPBACK), "own": within(own)}
    inner_filled = {name: fill(a) for name, (a, _) in inner.items()}
    inner_shut = {"lo-shut": within(LOOPBACK), "own-shut": within(own)}
    for a, _ in inner_shut.values():
        a.send(b"last words")
        a.shutdown(socket.SHUT_WR)
    s["sent-and-shut"].send(b"hello")
    s["sent-and-shut"].shutdown(socket.SHUT_WR)
    filled = fill(s["full-and-shut"])
    s["full-and-shut"].shutdown(socket.SHUT_WR)
    s["both-shut"].send(b"from client")
    s["both-shut"].shutdown(socket.SHUT_WR)
    s["timeout"].setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1234)
    s["timeout"].setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 3)
    asking = socket.socket(FAMILY)
    asking.setblocking(False)
    asking.connect_ex((where, 7001))  # the test drops what goes there
    time.sleep(0.3)
    wait()
    s["sent-and-shut"].settimeout(10)
    expect("sent-and-shut", read_all(s["sent-and-shut"]), b"answer")
    expect("full-and-shut", int(read_all(s["full-and-shut"]) or -1), filled)
    expect("shut-by-server", read_all(s["shut-by-server"]), b"good bye")
    s["shut-by-server"].send(b"late")
    s["shut-by-server"].close()
    expect("both-shut", read_all(s["both-shut"]), b"from server")
    with contextlib.suppress(ConnectionError):
        s["reset"].settimeout(5)
        expect("reset", s["reset"].recv(1), b"")  # an error or an end, but not silence
    expect("timeout", s["timeout"].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 1234)
    expect("syncnt", s["timeout"].getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT), 3)
    for name, (a, b) in inner.items():
        a.shutdown(socket.SHUT_WR)
        expect(name, read_all(b) == pattern(inner_filled[name]), True)
    for name, (a, b) in inner_shut.items():
        expect(name, read_all(b), b"last words")
        b.send(b"and the answer")
        b.close()
        expect(name, read_all(a), b"and the answer")
    asking.settimeout(10)
    expect("asking", asking.recv(7), b"welcome")


def server() -> None:
    listener = socket.create_server(("", 7000), family=FAMILY)
    other = socket.create_server(("", 7001), family=FAMILY)
    s = {name: listener.accept()[0] for name in NAMES}
    s["shut-by-server"].send(b"good bye")
    s["shut-by-server"].shutdown(socket.SHUT_WR)
    s["both-shut"].send(b"from server")
    s["both-shut"].shutdown(socket.SHUT_WR)
    s["reset"].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    s["reset"].close()
    time.sleep(0.3)
    wait()
    expect("sent-and-shut", read_all(s["sent-and-shut"]), b"hello")
    s["sent-and-shut"].send(b"answer")
    s["sent-and-shut"].close()
    data = read_all(s["full-and-shut"])
    expect("full-and-shut", data == pattern(len(data)), True)
    s["full-and-shut"].send(str(len(data)).encode())
    s["full-and-shut"].close()
    expect("shut-by-server", read_all(s["shut-by-server"]), b"late")
    expect("both-shut", read_all(s["both-shut"]), b"from client")
    other.settimeout(10)
    asked = other.accept()[0]
    asked.send(b"welcome")


server() if role == "server" else client()
print("done", flush=True)
