"""What the kernel can do. Each feature is tried, not looked up: a configuration says little about a sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from stasis.agent import cgroups
from stasis.agent.network.nft import Nft
from stasis.doctor.check import NEW_NETWORK, Check, Need, Status, apart, setting, syscall

AREA = "kernel"
OLDEST = (5, 10)
OTHER_KERNEL = "a kernel of a distribution (5.10 or newer) has it; in a sandbox, ask who runs it"


def checks() -> Iterator[Check]:
    yield _version()
    yield from _namespaces()
    yield _checkpoint_restore()
    yield _last_pid()
    yield from _system_calls()
    yield _ptrace()
    yield _freezer()
    yield _overlay()
    yield _seccomp()
    yield io_uring(setting("/proc/sys/kernel/io_uring_disabled"), _answers_io_uring())
    yield from _network()


def _version() -> Check:
    need = Need(AREA, "version", "older kernels and other processors were never tried", OTHER_KERNEL, needed=False)
    release, machine = platform.release(), platform.machine()
    numbers = tuple(int(n) for n in release.split("-")[0].split(".")[:2] if n.isdigit())
    return need.seen(numbers >= OLDEST and machine == "x86_64", f"{release} {machine}")


def _namespaces() -> Iterator[Check]:
    kinds = ("mnt", "pid", "net", "ipc", "uts")
    have = [kind for kind in kinds if os.path.exists(f"/proc/self/ns/{kind}")]
    need = Need(AREA, "namespaces", "without them there are no containers", OTHER_KERNEL)
    yield need.seen(len(have) == len(kinds), ", ".join(have) or "none")
    meaning = "without one, monotonic clocks jump at a restore on another machine, and timeouts with them"
    need = Need(AREA, "time namespace", meaning, OTHER_KERNEL, needed=False)
    there = os.path.exists("/proc/self/ns/time_for_children")
    yield need.seen(there, "there" if there else "none")


def _checkpoint_restore() -> Check:
    meaning = "without it the kernel does not tell what a process is made of, and none can be dumped"
    need = Need(AREA, "CONFIG_CHECKPOINT_RESTORE", meaning, OTHER_KERNEL)
    try:
        syscall(157, 35, 15, ctypes.c_uint(), 0, 0)  # prctl(PR_SET_MM, PR_SET_MM_MAP_SIZE): there only with the option
    except OSError:
        return need.seen(False, "not built in")
    return need.seen(True, "built in")


def _last_pid() -> Check:
    path = "/proc/sys/kernel/ns_last_pid"
    need = Need(AREA, "ns_last_pid", "without it processes cannot get their old pids back", OTHER_KERNEL)
    found = "there" if os.access(path, os.W_OK) else "read-only" if os.path.exists(path) else "none"
    return need.seen(found == "there", found)


def _system_calls() -> Iterator[Check]:
    calls = [
        ("openat2", 437, (-1, None, 0, 0), "files in a container cannot be reached without being led out by symlinks"),
        ("pidfd_getfd", 438, (-1, -1, 0), "sockets of a frozen process cannot be looked into"),
        ("close_range", 436, (7, 6, 0), "descriptors leak into the processes that are started"),
    ]
    for name, number, arguments, meaning in calls:
        try:  # no argument is valid: nothing happens
            syscall(number, *arguments)
            answer = errno.EINVAL
        except OSError as error:
            answer = error.errno or 0
        good = answer not in (errno.ENOSYS, errno.EPERM)
        yield Need(AREA, name, f"without it {meaning}", OTHER_KERNEL).seen(
            good, "works" if good else os.strerror(answer)
        )


def _ptrace() -> Check:
    scope = setting("/proc/sys/kernel/yama/ptrace_scope") or "0"
    remedy = "kernel.yama.ptrace_scope can be lowered only by a new start of the machine"
    need = Need(AREA, "ptrace", "with it forbidden no process can be dumped or restored", remedy)
    return need.seen(scope != "3", f"allowed (scope {scope})" if scope != "3" else "forbidden (scope 3)")


def _freezer() -> Check:
    def probe() -> str:
        mounts, own = cgroups.hierarchies(), cgroups.membership("self")
        for name, file, version in (("freezer", "freezer.state", "v1"), ("", "cgroup.freeze", "v2")):
            if name in mounts and name in own:
                group = Path(f"{mounts[name]}{own[name]}/stasis-doctor-{os.getpid()}")
                group.mkdir()
                try:
                    if (group / file).exists():
                        return f"cgroup {version}, groups can be made"
                finally:
                    group.rmdir()
        raise OSError("no hierarchy with a freezer is mounted")

    meaning = "without it a program cannot be stopped at one instant"
    remedy = "mount cgroups writable (a container needs `--privileged`), v1 with the freezer or v2"
    return Need(AREA, "cgroup freezer", meaning, remedy).tried(probe)


def _overlay() -> Check:
    there = "\toverlay\n" in (setting("/proc/filesystems") or "") + "\n"
    need = Need(AREA, "overlayfs", "without it no container can be started from an image", "modprobe overlay")
    return need.seen(there, "there" if there else "none, or its module is not loaded")


def _seccomp() -> Check:
    actions = (setting("/proc/sys/kernel/seccomp/actions_avail") or "").split()
    meaning = "without filters io_uring cannot be denied: programs that open it (PyTorch's store) cannot be dumped"
    need = Need(AREA, "seccomp filters", meaning, OTHER_KERNEL, needed=False)
    return need.seen("errno" in actions, "there" if "errno" in actions else "none")


def _answers_io_uring() -> bool:
    try:
        syscall(425, -1, None)
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.ENOSYS)
    return True


def io_uring(disabled: str | None, answers: bool) -> Check:
    """`disabled` is the setting kernel.io_uring_disabled: 0 for all, 1 for the privileged, 2 for nobody."""
    policy = {None: "no policy", "0": "allowed to all", "1": "allowed to some", "2": "forbidden"}.get(
        disabled, disabled
    )
    found = f"{policy or disabled} (kernel.io_uring_disabled), {'answers' if answers else 'denied to this process'}"
    meaning = (
        "CRIU cannot dump a program that has opened io_uring, so init denies it to the trainer from the start, by "
        "seccomp; where a container lacks CAP_SYS_ADMIN that sets no_new_privs: setuid programs (sudo) gain nothing"
    )
    return Check(AREA, "io_uring", Status.OK, found, meaning)


def _network() -> Iterator[Check]:
    tcp = "without it no connection between ranks survives"
    yield Need(AREA, "TCP_REPAIR", tcp, OTHER_KERNEL).tried(_tcp_repair)
    alone = "without it connections to others hang after a restore instead of failing at once"
    yield Need(AREA, "SOCK_DESTROY", alone, f"CONFIG_INET_DIAG_DESTROY: {OTHER_KERNEL}").tried(
        apart(NEW_NETWORK, _sock_destroy)
    )
    pair = Need(AREA, "veth", "without it containers have no network of their own", "modprobe veth")
    yield pair.tried(apart(NEW_NETWORK, _veth))
    lock = "without it the connections of a gang cannot be locked, and bytes in flight are lost"
    remedy = "install libnftables1; modprobe nf_tables"
    yield Need(AREA, "nftables", lock, remedy).tried(apart(NEW_NETWORK, lambda: _nft(FILTER)))
    move = "without it a gang cannot be resumed under other addresses"
    remedy = "modprobe nft_nat, nft_chain_nat, nf_conntrack"
    yield Need(AREA, "nftables NAT", move, remedy, needed=False).tried(apart(NEW_NETWORK, lambda: _nft(NAT)))


FILTER = """
table inet doctor {
    set peers { type ipv4_addr . inet_service; }
    chain in { type filter hook input priority -1; ip saddr . tcp sport @peers drop; }
    chain raw { type filter hook prerouting priority raw; tcp dport 1 notrack; }
}
"""
NAT = """
table ip doctor {
    chain out { type nat hook output priority -100; ip daddr 192.0.2.1 dnat to 192.0.2.2; }
    chain post { type nat hook postrouting priority 100; ct status dnat snat to 192.0.2.3; }
}
"""


def _nft(rules: str) -> str:
    fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.closing(Nft(fd)) as nft:
            nft.run(rules)
    finally:
        os.close(fd)
    return "works"


def _tcp_repair() -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.IPPROTO_TCP, 19, 1)  # linux/tcp.h: TCP_REPAIR
    return "works"


def _veth() -> str:
    made = subprocess.run(
        ["ip", "link", "add", "doctor0", "type", "veth", "peer", "name", "doctor1"], capture_output=True, text=True
    )
    if made.returncode:
        raise OSError(made.stderr.strip())
    return "works"


def _sock_destroy() -> str:
    """Ask for the end of a connection that does not exist: a kernel that can answers that there is none."""
    body = struct.pack("<BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    body += struct.pack(">HH16s16s", 1, 1, socket.inet_aton("192.0.2.1"), socket.inet_aton("192.0.2.2"))
    body += struct.pack("<III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    message = struct.pack("<IHHII", 16 + len(body), 21, 1 | 4, 1, 0) + body  # SOCK_DESTROY, REQUEST | ACK
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:  # NETLINK_SOCK_DIAG
        link.send(message)
        (code,) = struct.unpack_from("<i", link.recv(4096), 16)
    if -code != errno.ENOENT:
        raise OSError(-code, os.strerror(-code))
    return "works"
