"""init check: kubelet's questions over the network, asked from inside; init sleep; probes cut short by a freeze."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.apiserver import program

from .conftest import Init, children, status, until

pytestmark = pytest.mark.root
Start = Callable[..., Init]
Write = Callable[[str, str], None]
Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(init_binary: Path) -> Check:
    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([init_binary, "check", *map(str, args)], capture_output=True, text=True, timeout=20)

    return run


class Handler(http.server.BaseHTTPRequestHandler):
    seen: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers)))
        self.send_response(int(self.path.strip("/").split("?")[0] or 200))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(address: str) -> Iterator[tuple[int, list[tuple[str, dict[str, str]]]]]:
    handler = type("Mine", (Handler,), {"seen": []})
    server = http.server.ThreadingHTTPServer((address, 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1], handler.seen
    finally:
        server.shutdown()
        server.server_close()


def own_address() -> str:
    """The machine's other one than that of lo."""
    listed = subprocess.run(["ip", "-4", "-o", "address", "show", "up"], check=True, capture_output=True, text=True)
    return next(a for line in listed.stdout.splitlines() if not (a := line.split()[3].split("/")[0]).startswith("127."))


@pytest.mark.parametrize(("code", "exit_code"), [(200, 0), (204, 0), (399, 0), (404, 1), (500, 1), (503, 1)])
def test_http_holds_from_200_to_399(check: Check, code: int, exit_code: int) -> None:
    with serving("127.0.0.1") as (port, _):
        done = check("http", port, f"/{code}")
    assert done.returncode == exit_code
    assert (f"stasis-init: check: the answer is: {code}" in done.stderr) == bool(exit_code)


def test_http_asks_as_kubelet_does(check: Check) -> None:
    with serving("127.0.0.1") as (port, seen):
        assert check("http", port, "200?a=b", "X-Own: c", "Accept: text/x").returncode == 0
        assert check("http", port, "/", "Host: named.example").returncode == 0
    (path, headers), (_, named) = seen
    assert path == "/200?a=b"
    assert headers["Host"] == f"127.0.0.1:{port}"
    assert headers["User-Agent"].startswith("kube-probe/")
    assert headers["X-Own"] == "c"
    assert named["Host"] == "named.example"


def test_what_listens_at_the_containers_own_address_only_is_found(check: Check) -> None:
    with serving(own_address()) as (port, seen):
        assert check("http", port, "/").returncode == 0
        assert seen[0][1]["Host"] == f"{own_address()}:{port}"


def test_tcp_holds_where_something_listens(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check("tcp", port).returncode == 0
    done = check("tcp", port)
    assert (done.returncode, done.stderr) == (1, "stasis-init: check: Connection refused\n")
    assert check("http", port, "/").returncode == 1


def test_an_answer_that_is_no_http_does_not_hold(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble() -> None:
            connection = server.accept()[0]
            connection.recv(1000)
            connection.sendall(b"220 smtp.example ready\r\n")
            connection.close()

        threading.Thread(target=babble, daemon=True).start()
        assert check("http", server.getsockname()[1], "/").returncode != 0


@pytest.fixture(scope="module")
def health(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real server of grpc.health.v1.Health: etcd's."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    folder = tmp_path_factory.mktemp("etcd")
    listen = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"]
    etcd = subprocess.Popen(
        [program("etcd") / "bin/server", "--data-dir", folder / "data", "--unsafe-no-fsync", *listen],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"]},
    )
    try:
        until(lambda: socket.socket().connect_ex(("127.0.0.1", ports[0])) == 0, "etcd")
        yield ports[0]
    finally:
        etcd.kill()
        etcd.wait()


def test_grpc_asks_for_the_health_of_a_service(check: Check, health: int) -> None:
    until(lambda: check("grpc", health).returncode == 0, "that etcd serves")
    assert check("grpc", health, "").returncode == 0
    done = check("grpc", health, "no.such.Service")
    assert (done.returncode, "the service is not known" in done.stderr) == (1, True)


def test_grpc_of_what_is_none_does_not_hold(check: Check) -> None:
    with serving("127.0.0.1") as (port, _):
        assert check("grpc", port).returncode != 0


@pytest.mark.parametrize("args", [(), ("http",), ("udp", 1), ("tcp", "x"), ("tcp", 0), ("tcp", 65536)])
def test_wrong_arguments_are_told(check: Check, args: tuple[object, ...]) -> None:
    done = check(*args)
    assert done.returncode == 125
    assert done.stderr.startswith("stasis-init: check: expected")


def test_sleep_sleeps(init_binary: Path) -> None:
    assert subprocess.run([init_binary, "sleep", "0"]).returncode == 0
    sleeping = subprocess.Popen([init_binary, "sleep", "600"])
    assert sleeping.poll() is None
    sleeping.kill()
    sleeping.wait()
    assert subprocess.run([init_binary, "sleep", "soon"], stderr=subprocess.DEVNULL).returncode == 125


def begin_probe(container: Init, binary: Path, volume: Path, *command: str) -> subprocess.Popen[bytes]:
    inside = ["nsenter", "-t", str(container.pid), "-p", "-m"]
    return subprocess.Popen([*inside, binary, "probe", volume, "--", *command], stderr=subprocess.DEVNULL)


def test_a_probe_that_a_freeze_keeps_from_its_answer_holds(
    start: Start, write: Write, init_binary: Path, volume: Path, tmp_path: Path
) -> None:
    run = start("run", "sleep", "300")
    note = tmp_path / "note"
    probe = begin_probe(run, init_binary, volume, "sh", "-c", f"touch {note}; sleep 300; exit 5")
    until(note.exists, "the probe's start")
    write("state", "frozen")
    assert probe.wait(20) == 0
    assert not [pid for pid in children(run.pid) if status(pid).get("Name") == "sleep"], "nothing of it is left"


def test_a_probe_that_failed_because_of_a_freeze_holds(
    start: Start, write: Write, init_binary: Path, volume: Path, tmp_path: Path
) -> None:
    run = start("run", "sleep", "300")
    fails_when_frozen = f"echo frozen >{volume}/state; exit 5"
    assert begin_probe(run, init_binary, volume, "sh", "-c", fails_when_frozen).wait(20) == 0


def test_a_probe_that_the_runtime_kills_leaves_nothing_running(
    start: Start, init_binary: Path, volume: Path, tmp_path: Path
) -> None:
    run = start("run", "sleep", "300")
    note = tmp_path / "note"
    check = f"echo $$ >{note}.new; mv {note}.new {note}; exec sleep 200"
    probe = begin_probe(run, init_binary, volume, "sh", "-c", check)
    until(note.exists, "the probe's start")
    (waiting,) = [pid for pid in children(probe.pid) or [probe.pid] if status(pid)]
    os.kill(waiting, signal.SIGKILL)
    probe.wait(20)
    inside = ["nsenter", "-t", str(run.pid), "-p", "-m", "kill", "-0", note.read_text().strip()]
    until(lambda: subprocess.run(inside, stderr=subprocess.DEVNULL).returncode != 0, "the end of the check")


TRAINER = "trap 'echo got TERM; exit 4' TERM; echo ready; while :; do sleep 0.05; done"


def test_the_users_pre_stop_runs_before_the_trainer_is_told(start: Start, tmp_path: Path) -> None:
    fifo, note = tmp_path / "fifo", tmp_path / "note"
    os.mkfifo(fifo)
    hook = f"touch {note}; read x <{fifo}"
    run = begin_with_hook(start, hook)
    run.says("ready")
    os.kill(run.pid, signal.SIGTERM)
    until(note.exists, "the hook")
    time.sleep(0.2)
    assert "got TERM" not in run.output()
    fifo.write_text("go\n")
    assert run.wait() == 4
    assert "got TERM" in run.output()


@pytest.mark.parametrize("hook", ["exit 3", "exec no-such-program"])
def test_a_hook_that_fails_keeps_nobody_from_stopping(start: Start, hook: str) -> None:
    run = begin_with_hook(start, hook)
    run.says("ready")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 4


def test_the_grace_period_holds_for_hook_and_trainer_together(start: Start) -> None:
    run = begin_with_hook(start, "sleep 300", grace="0.3")
    run.says("ready")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 137
    assert "got TERM" not in run.output()


def begin_with_hook(start: Start, hook: str, grace: str = "60") -> Init:
    return start("run", "sh", "-c", TRAINER, options=["--grace", grace], hook=["sh", "-c", hook])


@pytest.mark.parametrize("args", [["0", "--", "true"], ["2", "a", "--", "true"], ["1", "a", "b"], ["x", "--", "true"]])
def test_a_hook_whose_words_are_miscounted_is_told(init_binary: Path, volume: Path, args: list[str]) -> None:
    command = [init_binary, "run", "--volume", volume, "--pre-stop", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 125
    assert "stasis-init: --pre-stop: expected" in done.stderr
