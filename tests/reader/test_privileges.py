"""The reader holds nothing that foreign bytes could use, and its agent hands it nothing but what it is to read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.reader.conftest import StartReader, until

from stasis.agent import privileges, proctree, provision
from stasis.agent.node import Node
from stasis.agent.reader import main, wire
from stasis.agent.reader.broker import Broker
from stasis.agent.reader.process import SOURCES
from stasis.store.reference import Reference

pytestmark = pytest.mark.root

# What is tried where foreign bytes took a process over.
INTRUDER = """
import encodings.idna, os, socket, sys
sys.path.insert(0, sys.argv[1])
from stasis.agent.reader.main import become_nobody
mine = os.open(sys.argv[2], os.O_RDONLY)
become_nobody(see_nothing=sys.argv[3] == "nothing")
def tried(what):
    try:
        what()
    except OSError as error:
        return type(error).__name__
    return "done"
print(os.read(mine, 6).decode())
for what in (
    lambda: open(sys.argv[2]),
    lambda: os.setuid(0),
    lambda: os.kill(os.getppid(), 0),
    lambda: open("/etc/passwd"),
    lambda: open("/new", "w"),
    lambda: socket.create_connection(("127.0.0.1", int(sys.argv[4]))),
    lambda: os.chroot("/"),
):
    print(tried(what))
"""


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def test_while_it_reads_no_thread_has_a_privilege(start: StartReader, stored: tuple[str, str]) -> None:
    reader = start(stored)
    reader.config()
    read, write = os.pipe()
    call = reader.start("files/shm", write)
    os.close(write)
    assert len(os.read(read, 4096)) == 4096  # it is at it, and waits for us

    tasks = os.listdir(f"/proc/{reader.pid}/task")
    assert len(tasks) > 1
    user = [str(main.FIRST_USER + reader.pid)] * 4
    for task in tasks:
        seen = status(int(task))
        assert (seen["Uid"], seen["Gid"], seen["Groups"], seen["NoNewPrivs"]) == (user, user, [], ["1"])
        assert {int(seen[f"Cap{kind}"][0], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert os.getsid(reader.pid) == reader.pid
    limits = Path(f"/proc/{reader.pid}/limits").read_text()
    rows = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()}
    assert rows["Max core file size"] == ["0", "0"]
    assert rows["Max address space"] == [str(main.MEMORY)] * 2
    assert rows["Max processes"] == [str(main.TASKS)] * 2
    opened = {os.readlink(f"/proc/{reader.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{reader.pid}/fd")}
    assert {path for path in opened if path.startswith("/") and "/blobs/sha256/" not in path} == {"/dev/null"}
    if stored[0].startswith("/"):
        assert os.listdir(f"/proc/{reader.pid}/root") == []
        assert os.readlink(f"/proc/{reader.pid}/ns/net") != os.readlink("/proc/self/ns/net")
    os.close(read)
    call.wait()


@pytest.mark.parametrize("sees", ["nothing", "something"])
def test_what_it_could_do(sees: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [str(SOURCES), str(secret), sees, str(server.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-I", "-B", "-c", INTRUDER, *arguments],
            capture_output=True,
            text=True,
            env={"OPENBLAS_NUM_THREADS": "1"},
        )
    handed, *tried = done.stdout.split()
    assert handed == "secret", done.stderr
    denied = "PermissionError"
    if sees == "nothing":
        assert tried == [*[denied] * 5, "OSError", denied]
    else:
        assert tried == [denied, denied, denied, "done", denied, "done", denied]


def test_it_outlives_the_thread_that_started_it_and_ends_with_the_agent(folder: tuple[str, str]) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(provision.criu()), *folder],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert agent.stdout
        reader = int(agent.stdout.readline())
        assert agent.stdout.readline() == "3\n"
        assert os.path.exists(f"/proc/{reader}")
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.communicate()
    assert until(lambda: not os.path.exists(f"/proc/{reader}"))


def test_it_ends_with_the_agent_even_when_it_is_stuck() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from stasis.agent.reader.main import end_with_agent\n"
    code += "end_with_agent(0); print(flush=True)\nwhile True: pass"
    stuck = subprocess.Popen([sys.executable, "-c", code, str(SOURCES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert stuck.stdin
        assert stuck.stdout
        assert stuck.stdout.read(1) == b"\n"
        stuck.stdin.close()
        assert stuck.wait(20) == -signal.SIGIO
    finally:
        stuck.kill()
        stuck.wait()
        stuck.stdout.close()


AGENT = """
import sys, threading, time
from pathlib import Path
from stasis.agent.reader.client import Reader
def start():
    global reader
    reader = Reader(Path(sys.argv[1]), *sys.argv[2:])
    print(reader.pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(reader.config().rank, flush=True)
time.sleep(600)
"""


def test_an_agent_hands_out_blobs_and_nothing_else(folder: tuple[str, str], tmp_path: Path) -> None:
    store = Path(folder[0])
    blobs = tmp_path / "store/blobs/sha256"
    blobs.mkdir(parents=True)
    blob = next(iter(sorted((store / "blobs/sha256").iterdir())))
    os.link(blob, blobs / blob.name)
    os.symlink("/etc/shadow", blobs / ("1" * 64))
    os.mkfifo(blobs / ("2" * 64))
    (blobs / ("3" * 64)).mkdir()

    ours, theirs = socket.socketpair()
    Broker(Reference(path=tmp_path / "store"), theirs)
    with ours:

        def ask(digest: object) -> tuple[object, list[int]]:
            wire.send(ours, {"blob": digest})
            answer, fds = wire.receive(ours, wire.MAX_REQUEST, fds=4, seconds=20)
            return answer.get("error", [""])[0], fds

        error, fds = ask(f"sha256:{blob.name}")
        assert (error, len(fds)) == ("", 1)
        assert os.pread(fds[0], 1 << 20, 0) == blob.read_bytes()[: 1 << 20]
        with pytest.raises(OSError, match="Bad file"):
            os.write(fds[0], b"x")
        os.close(fds[0])
        assert ask("sha256:" + "4" * 64) == ("NotFound", [])
        assert ask("sha256:" + "1" * 64) == ("StoreError", [])
        for digest in ("sha256:" + "2" * 64, "sha256:" + "3" * 64, "sha256:../../index.json", "/etc/shadow", 7, None):
            assert ask(digest) == ("Corrupt", [])


def test_privileges_are_not_given_up_by_one_of_several_threads() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="several threads"):
            privileges.forsake()
    finally:
        release.set()
        thread.join()


def test_processes_that_wait_for_an_order_are_used_and_end_with_the_node(
    folder: tuple[str, str], tmp_path: Path
) -> None:
    node = Node(tmp_path)
    node.warm(2)
    node.warm(2)
    assert until(lambda: len(children()) == 2)
    waiting = children()
    with node.reader(*folder) as reader:
        assert reader.pid in waiting
        assert reader.config().rank == 3
        assert children() == waiting
    node.close()
    assert children() == set()
    with node.reader(*folder) as reader:
        assert reader.config().rank == 3


def children() -> set[int]:
    """Readers of this process."""
    return {
        pid
        for pid in proctree.walk(os.getpid())
        if "stasis.agent.reader.main" in Path(f"/proc/{pid}/cmdline").read_text()
    }
