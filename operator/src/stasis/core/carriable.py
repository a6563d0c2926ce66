"""What CRIU 4.2.1 can carry of a process, told from the names that the kernel gives things; each refusal with its cause
and the remedy. Tried with the real CRIU, whose own messages come after the freeze and name neither cause nor process.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    cause: str
    remedy: str


# criu/files.c dump_one_file: all that it knows below anon_inode:
CARRIED_ANON_INODES = frozenset(
    {"[eventfd]", "[eventpoll]", "inotify", "[inotify]", "[fanotify]", "[signalfd]", "[timerfd]", "[pidfd]"}
)

_IO_URING = Refusal(
    "io_uring rings cannot be checkpointed",
    "deny io_uring from the start (Stasis's init does, as does containerd 2's RuntimeDefault seccomp profile); "
    "libuv, TCPStore and torchrun then fall back to epoll",
)
_BPF = Refusal("BPF objects cannot be checkpointed", "detach the eBPF agent before the checkpoint, or deny bpf in init")
_ANON_INODES = {
    "[io_uring]": _IO_URING,
    "[userfaultfd]": Refusal(
        "userfaultfd cannot be checkpointed", "deny userfaultfd in init, or close it before the checkpoint"
    ),
    "[perf_event]": Refusal(
        "perf events cannot be checkpointed",
        "stop the profiler before the checkpoint, or deny perf_event_open in init",
    ),
    "bpf-map": _BPF,
    "bpf-prog": _BPF,
    "bpf_link": _BPF,
    "bpf-link": _BPF,
    "btf": _BPF,
    "[landlock-ruleset]": Refusal("an open Landlock ruleset cannot be checkpointed", "close it once it is enforced"),
    "seccomp notify": Refusal(
        "a seccomp notification listener cannot be checkpointed", "run the supervisor of system calls outside the job"
    ),
    "[dmabuf]": Refusal("DMA buffers cannot be checkpointed", "close them before the checkpoint"),
}


def anon_inode(name: str) -> Refusal | None:
    """`name`: what follows `anon_inode:` in the link of a descriptor."""
    if name in CARRIED_ANON_INODES:
        return None
    if name.startswith("kvm"):
        return Refusal("virtual machines cannot be checkpointed", "run the virtual machine outside the job")
    return _ANON_INODES.get(name) or Refusal(
        f"CRIU cannot checkpoint descriptors of the kind {name}", "close it before the checkpoint"
    )


# A mapping of a kernel object, by the beginning of the path that /proc/PID/maps shows.
_MAPPINGS = {
    "anon_inode:[io_uring]": _IO_URING,
    "anon_inode:[perf_event]": _ANON_INODES["[perf_event]"],
    "anon_inode:bpf-map": _BPF,
    "anon_inode:": Refusal("CRIU cannot checkpoint a mapping of this kernel object", "unmap it before the checkpoint"),
    "[uprobes]": Refusal(
        "user-space probes are set in this process", "remove the uprobes (perf, bpftrace) before the checkpoint"
    ),
    "/dmabuf:": _ANON_INODES["[dmabuf]"],
    "/secretmem": Refusal(
        "secret memory (memfd_secret) cannot be read, so it cannot be checkpointed", "keep the secret in usual memory"
    ),
}


def mapping(path: str) -> Refusal | None:
    """`path` as /proc/PID/maps shows it; for character and block devices, `device` decides."""
    return next((refusal for start, refusal in _MAPPINGS.items() if path.startswith(start)), None)


_MEM = 1  # null, zero, full, random, urandom, kmsg: reopened by path
_TTYS = frozenset({2, 3, 4, 5, *range(136, 144), 204})  # criu/tty.c: pseudo, console, serial terminals
_MISC, _TUN = 10, 200
_HARDWARE = (
    "no driver of Stasis saves the state of this device: run the job without it, or close it before the checkpoint"
)


def device(path: str, block: bool, major: int, minor: int, mapped: bool) -> Refusal | None:
    """A descriptor of a device node, or a mapping of one (of which CRIU carries only /dev/zero)."""
    if not block and (major == _MEM if not mapped else (major, minor) == (_MEM, 5)):
        return None
    if not mapped and not block and (major in _TTYS or (major, minor) == (_MISC, _TUN)):
        return None
    kind = "block" if block else "character"
    name = path.removeprefix("/dev/").split(" ")[0]
    known = {
        "nvidia": "an NVIDIA GPU is in use",
        "kfd": "an AMD GPU is in use",
        "dri/": "a GPU is in use",
        "infiniband": "an InfiniBand or RoCE adapter is in use",
        "fuse": "a FUSE file system is served",
        "kvm": "a virtual machine runs",
    }
    what = next((text for start, text in known.items() if name.startswith(start)), "")
    if what:
        return Refusal(f"{what} ({path}), which CRIU cannot checkpoint", _HARDWARE)
    verb = "mapped" if mapped else "open"
    return Refusal(f"a {kind} device is {verb} ({path}, {major}:{minor}), which CRIU cannot checkpoint", _HARDWARE)


_FAMILIES = {
    "AX25": 3, "X25": 9, "KEY": 15, "RDS": 21, "PPPOX": 24, "LLC": 26, "IB": 27, "CAN": 29, "TIPC": 30,
    "BLUETOOTH": 31, "RXRPC": 33, "ALG": 38, "NFC": 39, "VSOCK": 40, "KCM": 41, "QIPCRTR": 42, "SMC": 43, "XDP": 44,
    "MCTP": 45,
}  # fmt: skip
_UNIX, _INET, _INET6, _NETLINK, _PACKET = 1, 2, 10, 16, 17
_STREAM, _DGRAM, _RAW = 1, 2, 3
_PROTOCOLS: Set[int] = frozenset({0, 1, 6, 17, 58, 136})  # IP, ICMP, TCP, UDP, ICMPv6, UDP-Lite (sk-inet.c)
_PROTOCOL_NAMES = {33: "DCCP", 115: "L2TP", 132: "SCTP", 256: "SMC", 262: "MPTCP"}


def socket(family: int, kind: int, protocol: int) -> Refusal | None:
    """By SO_DOMAIN, SO_TYPE and SO_PROTOCOL."""
    if family in (_UNIX, _NETLINK, _PACKET):
        return None
    if family in (_INET, _INET6):
        if kind == _RAW or (kind in (_STREAM, _DGRAM) and protocol in _PROTOCOLS):
            return None
        name = _PROTOCOL_NAMES.get(protocol, f"protocol {protocol}")
        remedy = "use TCP or UDP"
        if name == "MPTCP":
            remedy = "use plain TCP (Go programs: GODEBUG=multipathtcp=0)"
        return Refusal(f"CRIU cannot checkpoint {name} sockets", remedy)
    name = next((name for name, number in _FAMILIES.items() if number == family), str(family))
    return Refusal(f"CRIU cannot checkpoint sockets of the family AF_{name}", "close it before the checkpoint")
