"""What can be carried is not refused: a busy program with all that CRIU knows, and things that only pass by."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.preflight.conftest import Pod

from stasis.agent import proctree
from stasis.agent.freezer import Freezer
from stasis.agent.lookup import Root, children
from stasis.agent.scan import scan

pytestmark = pytest.mark.root

CARRIED = """
# kernel objects
epoll = select.epoll(); call(libc.eventfd(1, 0)); call(libc.timerfd_create(1, 0)); watches = call(libc.inotify_init1(0))
for place in (b"/etc", b"/dev/shm", b".", b"/etc/hostname"):
    call(libc.inotify_add_watch(watches, place, 0x100))
call(libc.signalfd(-1, (ctypes.c_ulong * 16)(), 0)); call(libc.memfd_create(b"tensor", 2))
# pipes, one with a closed end each, one in use by both sides; a FIFO; a terminal whose both sides are here
r, w = os.pipe(); epoll.register(r, 1); spare = os.dup(r)
r1, w1 = os.pipe(); os.close(r1)
r2, w2 = os.pipe(); os.close(w2)
os.mkfifo("fifo"); fifo = os.open("fifo", os.O_RDWR)
master, slave = os.openpty()
# devices
null, zero, random = (open(f"/dev/{name}", "rb") for name in ("null", "zero", "urandom"))
shared = mmap.mmap(zero.fileno(), 4096, mmap.MAP_PRIVATE)
# sockets
pairs = [socket.socketpair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
pairs[0][0].send(b"under way"); pairs[1][0].close()
listening = socket.create_server(("", 0)); client = socket.create_connection(("127.0.0.1", listening.getsockname()[1]))
accepted, _ = listening.accept(); client.send(b"under way")
six = socket.create_server(("::1", 0), family=socket.AF_INET6); socket.create_connection(six.getsockname()[:2])
six.accept()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 0)); fresh = socket.socket()
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); packet = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 8)
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); netlink.bind((0, 1))
named = socket.socket(socket.AF_UNIX); named.bind("named"); named.listen()
waiting = socket.socket(socket.AF_UNIX); waiting.connect("named")
# files of all sorts
proc = [open("/proc/self/status"), open("/proc/1/status"), open("/proc/meminfo")]
deleted = open("deleted", "w"); os.unlink("deleted"); folder = os.open(".", os.O_RDONLY)
os.mkdir("cwd"); os.chdir("cwd"); os.rmdir("../cwd")
# processes: a zombie, a stopped one, a session of its own, threads, a pidfd each of a living and an ended one
zombie = os.fork() or os._exit(7)
stopped = os.fork() or signal.pause()
os.kill(stopped, signal.SIGSTOP)
leader = os.fork() or (os.setsid(), os.close(r), os.fork(), signal.pause())
ended = subprocess.Popen(["true"]); pidfds = [os.pidfd_open(stopped), os.pidfd_open(ended.pid)]; ended.wait()
for _ in range(3):
    threading.Thread(target=signal.pause, daemon=True).start()
ready()
os.kill(stopped, signal.SIGKILL); os.killpg(leader, signal.SIGKILL)
os._exit(0)
"""


def test_what_criu_carries_is_no_finding_and_is_left_as_it_is(pod: Callable[[str], Pod]) -> None:
    container = pod(CARRIED)
    fds = {fd: os.readlink(f"/proc/{container.trainer}/fd/{fd}") for fd in os.listdir(f"/proc/{container.trainer}/fd")}

    assert [str(finding) for finding in scan(container.pid1, container.root)] == []

    after = {
        fd: os.readlink(f"/proc/{container.trainer}/fd/{fd}") for fd in os.listdir(f"/proc/{container.trainer}/fd")
    }
    assert after == fds
    assert container.finish() == 0


def test_processes_of_exec_beside_the_tree_are_no_finding(pod: Callable[[str], Pod]) -> None:
    """Probes and `kubectl exec` run in the container, but their parent is not init."""
    container = pod("ready()")
    container.enter("ready()", "-m -p")
    assert scan(container.pid1, container.root) == []


def test_a_tree_that_lives_in_a_time_namespace_as_a_whole_is_no_finding(pod: Callable[[str], Pod]) -> None:
    """As every restored tree does: CRIU gives it one, so that its monotonic clocks go on."""
    container = pod(
        """
        call(libc.unshare(0x80))
        if os.fork() == 0:
            ready()
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        """
    )
    (inside,) = children(container.trainer)

    as_a_part = scan(container.pid1, container.root)
    as_a_whole = scan(container.pid1, Root(inside, proctree.start_time(inside)))

    assert {finding.pid for finding in as_a_part if "ns/time" in finding.where} == {container.trainer, inside}
    assert [finding for finding in as_a_whole if "ns/time" in finding.where] == []


def test_a_frozen_tree_is_read_as_well(pod: Callable[[str], Pod]) -> None:
    container = pod(CARRIED)
    with Freezer.of(container.pid1, container_id=f"stasis-test-scan-{os.getpid()}") as freezer:
        try:
            freezer.gather(container.root.pid)
            freezer.freeze()
            assert [str(finding) for finding in scan(container.pid1, container.root, frozen=True)] == []
        finally:
            freezer.thaw()
            status = container.finish()
            freezer.remove()
    assert status == 0


def test_what_passes_by_is_no_finding(pod: Callable[[str], Pod]) -> None:
    """Short children, short connections, data soon read: there at every reading, but never the same twice."""
    container = pod(
        """
        listening = socket.create_server(("127.0.0.1", 0))
        def serve():
            while True:
                connection, _ = listening.accept()
                time.sleep(0.01)
                connection.close()
        def ask():
            while True:
                with socket.create_connection(listening.getsockname()) as connection:
                    connection.recv(1)
        def fork():
            while True:
                subprocess.run(["true"])
        for target in (serve, ask, fork):
            threading.Thread(target=target, daemon=True).start()
        ready()
        os._exit(0)
        """
    )
    assert scan(container.pid1, container.root) == []
    assert container.finish() == 0


def test_a_tree_that_is_gone_is_no_empty_result(pod: Callable[[str], Pod]) -> None:
    container = pod("ready()\nos._exit(0)")
    assert container.finish() == 0
    with pytest.raises(ProcessLookupError):
        scan(container.pid1, container.root)
