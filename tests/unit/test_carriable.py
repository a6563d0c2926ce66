"""The table of what CRIU can carry: what it knows passes, every other name is refused with cause and remedy."""

from __future__ import annotations

import socket

import pytest

from stasis.core import carriable


@pytest.mark.parametrize("name", sorted(carriable.CARRIED_ANON_INODES))
def test_kernel_objects_that_criu_knows(name: str) -> None:
    assert carriable.anon_inode(name) is None


@pytest.mark.parametrize(
    "name", ["[io_uring]", "bpf-map", "bpf-prog", "[perf_event]", "seccomp notify", "kvm-vcpu:0", "[new]"]
)
def test_any_other_kernel_object_is_refused(name: str) -> None:
    refusal = carriable.anon_inode(name)
    assert refusal
    assert refusal.cause
    assert refusal.remedy


@pytest.mark.parametrize(
    ("path", "block", "major", "minor", "mapped", "carried"),
    [
        ("/dev/null", False, 1, 3, False, True),
        ("/dev/urandom", False, 1, 9, False, True),
        ("/dev/zero", False, 1, 5, True, True),
        ("/dev/mem", False, 1, 1, True, False),
        ("/dev/pts/0", False, 136, 0, False, True),
        ("/dev/ptmx", False, 5, 2, False, True),
        ("/dev/net/tun", False, 10, 200, False, True),
        ("/dev/fuse", False, 10, 229, False, False),
        ("/dev/nvidiactl", False, 195, 255, False, False),
        ("/dev/nvidia0", False, 195, 0, True, False),
        ("/dev/kfd", False, 234, 0, False, False),
        ("/dev/infiniband/uverbs0", False, 231, 192, True, False),
        ("/dev/sda", True, 8, 0, False, False),
    ],
)
def test_devices(path: str, block: bool, major: int, minor: int, mapped: bool, carried: bool) -> None:
    refusal = carriable.device(path, block, major, minor, mapped=mapped)
    assert (refusal is None) == carried
    assert carried or (refusal and path in refusal.cause)


@pytest.mark.parametrize(
    ("family", "kind", "protocol", "named"),
    [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""),
        (socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_UDP, ""),
        (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP, ""),
        (socket.AF_INET, socket.SOCK_RAW, 89, ""),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, ""),
        (socket.AF_INET, socket.SOCK_STREAM, 262, "MPTCP"),
        (socket.AF_INET, socket.SOCK_SEQPACKET, socket.IPPROTO_SCTP, "SCTP"),
        (socket.AF_VSOCK, socket.SOCK_STREAM, 0, "AF_VSOCK"),
        (38, socket.SOCK_SEQPACKET, 0, "AF_ALG"),
        (44, socket.SOCK_RAW, 0, "AF_XDP"),
        (99, socket.SOCK_RAW, 0, "99"),
    ],
)
def test_sockets(family: int, kind: int, protocol: int, named: str) -> None:
    refusal = carriable.socket(family, kind, protocol)
    assert (refusal is None) == (not named)
    assert refusal is None or named in refusal.cause


@pytest.mark.parametrize("path", ["anon_inode:[io_uring]", "/secretmem (deleted)", "[uprobes]", "anon_inode:new"])
def test_mappings_of_kernel_objects_are_refused(path: str) -> None:
    assert carriable.mapping(path)


@pytest.mark.parametrize("path", ["/usr/lib/libc.so.6", "[heap]", "/memfd:x (deleted)", "/[aio] (deleted)", "[vdso]"])
def test_mappings_of_files_and_memory_are_carried(path: str) -> None:
    assert carriable.mapping(path) is None
