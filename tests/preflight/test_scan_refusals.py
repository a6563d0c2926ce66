"""What cannot be carried is refused before anything is frozen, with process, descriptor, cause and remedy."""

from __future__ import annotations

import re
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.preflight.conftest import Pod, until

from stasis.agent import proctree
from stasis.agent.lookup import children
from stasis.agent.scan import scan
from stasis.agent.scan.snapshot import read_tree

pytestmark = pytest.mark.root

# name: (program up to ready(), what the finding points to, words of its cause)
REFUSED = {
    "io_uring": (
        "fd = call(libc.syscall(425, 8, ctypes.create_string_buffer(120)))",
        r"fd 3 -> .*io_uring",
        "io_uring",
    ),
    "io_uring mapping": (
        """
        fd = call(libc.syscall(425, 8, ctypes.create_string_buffer(120)))
        ring = mmap.mmap(fd, 4096)
        os.closerange(3, 9)  # mmap has made a copy of the descriptor
        """,
        r"mapping .* -> anon_inode:\[io_uring\]",
        "io_uring",
    ),
    "userfaultfd": ("call(libc.syscall(323, 0))", r"fd 3 -> .*userfaultfd", "userfaultfd"),
    "perf": (
        """
        attr = struct.pack("IIQQQQQ", 1, 112, 1, 0, 0, 0, 1 << 5 | 1 << 6).ljust(112, b"\\0")
        call(libc.syscall(298, attr, 0, -1, -1, 0))
        """,
        r"fd 3 -> .*perf_event",
        "perf",
    ),
    "bpf map": (
        'call(libc.syscall(321, 0, struct.pack("IIIII", 2, 4, 8, 16, 0).ljust(128, b"\\0"), 128))',
        r"fd 3 -> anon_inode:bpf-map",
        "BPF",
    ),
    "landlock ruleset": (
        'call(libc.syscall(444, struct.pack("QQ", 1, 0), 8, 0))',
        r"fd 3 -> .*landlock",
        "Landlock",
    ),
    "secret memory": (
        """
        fd = call(libc.syscall(447, 0))
        os.ftruncate(fd, 4096)
        secret = mmap.mmap(fd, 4096)
        secret[:1] = b"x"
        os.closerange(3, 9)
        """,
        r"mapping .* -> /secretmem",
        "secret memory",
    ),
    "mapped device": (
        """
        os.mknod("disk", 0o60600, os.makedev(7, 0))
        fd = os.open("disk", os.O_RDONLY)
        device = mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
        os.closerange(3, 9)
        """,
        r"mapping .* -> /.*/disk",
        "block device is mapped",
    ),
    "packet pipe": ("os.pipe2(os.O_DIRECT)", r"fd 4 -> pipe:", "packet pipe"),
    "message queue": (
        'fd = call(libc.mq_open(b"/q1", os.O_CREAT | os.O_RDWR, 0o600, None))\ncall(libc.mq_unlink(b"/q1"))',
        r"fd 3 -> /q1",
        "message queues",
    ),
    "message queue left behind": (
        'os.close(call(libc.mq_open(b"/q1", os.O_CREAT | os.O_RDWR, 0o600, None)))',
        r"/mqueue/q1$",
        "message queue exists",
    ),
    "shared memory segment": (
        "sid = call(libc.shmget(0x5151, 4096, 0o1600))",
        r"/proc/sysvipc/shm: key 0x5151",
        "System V shared memory",
    ),
    "semaphores": ("call(libc.semget(0x5152, 1, 0o1600))", r"/proc/sysvipc/sem: key 0x5152", "System V semaphore"),
    "System V message queue": (
        "call(libc.msgget(0x5153, 0o1600))",
        r"/proc/sysvipc/msg: key 0x5153",
        "System V message",
    ),
    "traced": (
        """
        if (child := os.fork()) == 0:
            time.sleep(1000)
        call(libc.ptrace(0x4206, child, None, None))
        """,
        r"",
        "traced by process .* a process of the job itself",
    ),
    "network namespace": ("unshared(0x40000000)", r"ns/net -> net:", "its own network namespace"),
    "mount namespace": ("unshared(0x20000)", r"ns/mnt -> mnt:", "its own mount namespace"),
    "user namespace": ("unshared(0x10000000)", r"ns/user -> user:", "its own user namespace"),
    "IPC namespace": ("unshared(0x08000000)", r"ns/ipc -> ipc:", "its own IPC namespace"),
    "UTS namespace of a thread": (
        """
        def run():
            call(libc.unshare(0x04000000))
            go.set()
            time.sleep(1000)
        go = threading.Event()
        threading.Thread(target=run, daemon=True).start()
        go.wait()
        """,
        r"ns/uts -> uts:\[\d+\] of thread",
        "its own UTS namespace",
    ),
    "time namespace of children": ("unshared(0x80)", r"ns/time_for_children", "its own time .* namespace"),
    "vsock": ("s = socket.socket(socket.AF_VSOCK)", r"fd 3 -> socket:", "AF_VSOCK"),
    "MPTCP": ("s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)", r"fd 3 -> socket:", "MPTCP"),
    "MPTCP in use": (
        """
        a = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
        a.bind(("127.0.0.1", 0))
        a.listen()
        b = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
        b.connect(a.getsockname())
        c = a.accept()
        """,
        r"fd 3 -> socket:",
        "MPTCP",
    ),
    "netlink unread": (  # the answers are never read to their end, though their number changes
        """
        s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        def ask():
            while True:
                s.send(struct.pack("IHHIIBBHiII", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0, 0))
                s.recv(65536)
                time.sleep(0.01)
        threading.Thread(target=ask, daemon=True).start()
        time.sleep(0.1)
        """,
        r"fd 3 -> socket:",
        "netlink socket holds data",
    ),
    "TCP connection to be accepted": (
        """
        a = socket.create_server(("127.0.0.1", 0))
        b = socket.create_connection(a.getsockname())
        """,
        r"fd 3 -> socket:\[\d+\] 127.0.0.1:\d+",
        "connections wait to be accepted",
    ),
    "UNIX connection closed before accept": (
        """
        a = socket.socket(socket.AF_UNIX)
        a.bind("\\0gone")
        a.listen()
        b = socket.socket(socket.AF_UNIX)
        b.connect("\\0gone")
        b.close()
        """,
        r"fd 3 -> socket:\[\d+\] @gone",
        "closed already",
    ),
    "data before accept": (
        """
        a = socket.socket(socket.AF_UNIX)
        a.bind("\\0busy")
        a.listen()
        b = socket.socket(socket.AF_UNIX)
        b.connect("\\0busy")
        b.send(b"hello")
        """,
        r"fd 4 -> socket:",
        "not accepted yet",
    ),
    "pidfd of init": ("os.pidfd_open(1)", r"fd 3 -> anon_inode:\[pidfd\]", "pidfd of process .* not in the job's tree"),
    "pidfd of a thread": ("os.pidfd_open(os.getpid(), os.O_EXCL)", r"fd 3 ->", "pidfd of a thread"),
    "inotify on an overlay": (
        """
        for name in ("lower", "upper", "work", "root"):
            os.mkdir(name)
        call(libc.mount(b"overlay", b"root", b"overlay", 0, b"lowerdir=lower,upperdir=upper,workdir=work"))
        os.mkdir("root/watched")
        call(libc.inotify_add_watch(call(libc.inotify_init1(0)), b"root/watched", 0x100))
        """,
        r"fd 3 -> anon_inode:inotify \(inode \d+\)",
        "watches a file or folder in the container's own file system",
    ),
    "epoll of a closed descriptor": (
        """
        epoll = select.epoll()
        r, w = os.pipe()
        epoll.register(r, 1)
        if os.fork() == 0:
            epoll.close()
            time.sleep(1000)
        os.close(r)
        """,
        r"fd 3 -> anon_inode:\[eventpoll\]",
        "still watches descriptor 4",
    ),
    "main thread ended": (
        """
        def run():
            while open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
            ready()
            os._exit(0)
        threading.Thread(target=run).start()
        libc.syscall(60, 0)
        """,
        r"thread \d+",
        "main thread has ended",
    ),
    "shared address space": (
        """
        stack = mmap.mmap(-1, 1 << 20)
        top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 20) - 64
        call(libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(top), 0x100 | 17, None))
        """,
        r"",
        "shares its memory with its parent",
    ),
    "vfork without exec": (
        """
        def parent():
            if libc.syscall(56, 0x4000 | 0x100 | 17, 0, 0, 0, 0) == 0:
                libc.pause()
        threading.Thread(target=parent, daemon=True).start()
        time.sleep(0.2)
        """,
        r"",
        "shares its memory with its parent",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_pid_place_cause_and_remedy_and_nothing_changed(name: str, pod: Callable[[str], Pod]) -> None:
    program, where, cause = REFUSED[name]
    container = pod(program if "ready()" in program else textwrap.dedent(program) + "\nready()\nos._exit(0)")

    findings = scan(container.pid1, container.root)

    assert len(findings) == 1, [str(finding) for finding in findings]
    (finding,) = findings
    assert re.search(where, finding.where), finding
    assert re.search(cause, finding.cause), finding
    assert finding.remedy
    if name not in ("message queue left behind", "semaphores", "System V message queue"):  # no process owns these
        tree = read_tree(container.pid1, container.root.pid)
        assert finding.pid in tree.pids
        assert finding.comm == tree.by_pid[finding.pid].comm
    assert container.finish() == 0


def test_a_tracer_outside_the_tree_is_named(pod: Callable[[str], Pod]) -> None:
    container = pod("threading.Thread(target=signal.pause, daemon=True).start()\nready()")
    thread = max(proctree.tasks(container.trainer))
    tracer = container.enter(
        f"call(libc.ptrace(0x4206, {thread_inside(container, thread)}, None, None))\nready()", "-m -p"
    )

    (finding,) = scan(container.pid1, container.root)

    assert finding.where == f"thread {thread}"
    assert f"traced by process {children(tracer.pid)[0]}" in finding.cause
    assert "a process outside the job's tree" in finding.cause


def thread_inside(container: Pod, thread: int) -> int:
    """The thread's id as the container sees it."""
    found = re.search(r"^NSpid:.*\s(\d+)$", proctree.read(container.trainer, thread, "status"), re.MULTILINE)
    assert found
    return int(found[1])


def test_a_process_stuck_in_the_kernel_is_refused(pod: Callable[[str], Pod]) -> None:
    container = pod(
        """
        fd = os.open("/dev/fuse", os.O_RDWR)  # a file server that never answers
        os.mkdir("served")
        options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fd
        call(libc.mount(b"fuse", b"served", b"fuse", 0, options))
        if os.fork() == 0:
            os.listdir("served")
        ready()
        """
    )
    (child,) = children(container.trainer)
    until(lambda: proctree.state(child, child) == "D", "waiting for the server")

    served, stuck = scan(container.pid1, container.root)

    assert (stuck.pid, served.pid) == (child, container.trainer)
    assert re.search(r"stuck in the kernel \(state D, fuse", stuck.cause)
    assert "FUSE file system is served (/dev/fuse)" in served.cause


def test_what_exec_left_behind_is_refused_as_an_orphan(pod: Callable[[str], Pod]) -> None:
    container = pod("ready()")
    leftover = container.enter(
        """
        if os.fork() == 0:
            os.setsid()
            print("ready", flush=True)
            time.sleep(1000)
        os._exit(0)
        """,
        "-m -p",
    )
    leftover.wait()

    (finding,) = scan(container.pid1, container.root)

    assert finding.pid in children(container.pid1)
    assert "child of init" in finding.cause


# what the job does, what a neighbour in its pod does, the cause
BETWEEN_CONTAINERS = {
    "UNIX stream": (
        'a = socket.socket(socket.AF_UNIX)\na.bind("meet")\na.listen()\nprint("listening", flush=True)\n'
        "b = a.accept()\nready()",
        's = socket.socket(socket.AF_UNIX)\ns.connect("meet")\nready()',
        "UNIX socket at .*meet connects it with process",
    ),
    "UNIX datagrams": (
        'print("listening", flush=True)\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n'
        'while s.connect_ex("log"):\n    time.sleep(0.01)\nready()',
        's = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.bind("log")\nready()',
        "UNIX socket at log connects it with process",
    ),
    "TCP over loopback": (
        'a = socket.create_server(("127.0.0.1", 7001))\nprint("listening", flush=True)\nb = a.accept()\nready()',
        's = socket.create_connection(("127.0.0.1", 7001))\nready()',
        "TCP connection within the pod connects it with process",
    ),
    "FIFO": (
        'os.mkfifo("fifo")\nprint("listening", flush=True)\nf = os.open("fifo", os.O_RDONLY)\nready()',
        'f = os.open("fifo", os.O_WRONLY)\nready()',
        r"process \d+ .* outside the job's tree has this FIFO open",
    ),
    "shared memory": (
        'f = open("/dev/shm/x", "w+b")\nf.truncate(4096)\nm = mmap.mmap(f.fileno(), 4096)\nf.close()\n'
        'print("listening", flush=True)\nready()',
        'f = open("/dev/shm/x", "r+b")\nm = mmap.mmap(f.fileno(), 4096)\nready()',
        "this memory is shared with process",
    ),
}


@pytest.mark.parametrize("name", BETWEEN_CONTAINERS)
def test_what_is_shared_with_another_container_is_refused(name: str, pod: Callable[[str], Pod]) -> None:
    program, neighbour, cause = BETWEEN_CONTAINERS[name]
    container = pod(program.replace("listening", "ready-to-meet"))
    other = container.enter(neighbour)
    until(lambda: container.said_again("ready\n"), "the two have met")

    findings = scan(container.pid1, container.root)

    assert len(findings) == 1, [str(finding) for finding in findings]
    (finding,) = findings
    assert re.search(cause, finding.cause), finding
    assert str(other.pid) in finding.cause
    assert finding.pid == container.trainer
    assert container.finish() == 0


def test_a_pipe_to_a_process_outside_the_tree_is_refused(pod: Callable[[str], Pod]) -> None:
    """Passed over a socket that is closed again: nothing else still tells of the other process."""
    container = pod(
        """
        a = socket.socket(socket.AF_UNIX)
        a.bind("meet")
        a.listen()
        print("ready-to-meet", flush=True)
        b, _ = a.accept()
        _, fds, _, _ = socket.recv_fds(b, 1, 1)
        a.close(), b.close()
        ready()
        """
    )
    other = container.enter(
        """
        r, w = os.pipe()
        s = socket.socket(socket.AF_UNIX)
        s.connect("meet")
        socket.send_fds(s, [b"x"], [w])
        os.close(w), s.close()
        ready()
        """
    )
    until(lambda: container.said_again("ready\n"), "the pipe has arrived")

    (finding,) = scan(container.pid1, container.root)

    assert re.search(r"fd \d+ -> pipe:", finding.where)
    assert f"belongs to process {other.pid}" in finding.cause


@pytest.mark.parametrize("outside", ["log", "/dev/null"])
def test_a_file_outside_the_container_is_refused(outside: str, pod: Callable[[str], Pod], tmp_path: Path) -> None:
    """As where a file was given as stdout: the container's mounts do not have it, and CRIU opens by path again."""
    container = pod(
        """
        print("ready-to-meet", flush=True)
        a = socket.socket(socket.AF_UNIX)
        a.bind("meet")
        a.listen()
        b, _ = a.accept()
        _, fds, _, _ = socket.recv_fds(b, 1, 1)
        a.close(), b.close()
        ready()
        """
    )
    (tmp_path / "log").touch()
    with socket.socket(socket.AF_UNIX) as connection, open(tmp_path / outside) as file:
        until(lambda: connection.connect_ex(str(container.folder / "meet")) == 0, "connected")
        socket.send_fds(connection, [b"x"], [file.fileno()])
        until(lambda: container.said_again("ready\n"), "the file has arrived")

    (finding,) = scan(container.pid1, container.root)

    assert finding.where.endswith(f"-> {tmp_path / outside}")
    assert "outside the container" in finding.cause


def test_what_many_processes_inherited_is_said_once(pod: Callable[[str], Pod]) -> None:
    container = pod(
        """
        fd = call(libc.syscall(425, 8, ctypes.create_string_buffer(120)))
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(1000)
        ready()
        """
    )
    (finding,) = scan(container.pid1, container.root)
    assert finding.pid == container.trainer
    assert finding.where.endswith("(and in 3 more processes)")
