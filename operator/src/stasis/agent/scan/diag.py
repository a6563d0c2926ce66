"""The kernel's tables of the sockets of a network namespace (NETLINK_SOCK_DIAG, /proc/PID/net)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from stasis.agent import namespaces, proctree

_SOCK_DIAG_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ALL_STATES = 0xFFFFFFFF
_UDIAG_SHOW = 0x01 | 0x04 | 0x08 | 0x10  # name, peer, connections to be accepted, queue lengths
_UNIX_NAME, _UNIX_PEER, _UNIX_ICONS, _UNIX_RQLEN = 0, 2, 3, 4
_INET_ULP, _ULP_NAME = 19, 1
_WITH_INFO = 1 << 1  # without it the kernel leaves out INET_DIAG_ULP_INFO too
LISTEN, CLOSE, ESTABLISHED = 10, 7, 1

Address = tuple[str, int]


@dataclass(frozen=True)
class UnixSocket:
    inode: int
    state: int
    name: str  # "@..." for an abstract one
    peer: int  # its peer's inode; 0: none, or not accepted yet
    waiting: tuple[int, ...]  # of a listening one: inodes of those to be accepted; 0: closed already
    unsent: int  # bytes of memory in its write queue


@dataclass(frozen=True)
class TcpSocket:
    inode: int  # 0: no process has it any more, or yet
    state: int
    local: Address
    remote: Address
    backlog: int  # of a listening one: how many wait to be accepted
    ulp: str  # "tls" and the like


@dataclass(frozen=True)
class Tables:
    unix: dict[int, UnixSocket]
    tcp: list[TcpSocket]
    netlink_unread: dict[int, int]  # inode -> bytes of memory in its receive queue
    other: set[int]  # UDP and packet sockets

    @property
    def known(self) -> set[int]:
        return {*self.unix, *(tcp.inode for tcp in self.tcp), *self.netlink_unread, *self.other}


def read(pid: int) -> Tables:
    """Of the network namespace of `pid`. ProcessLookupError: it is gone."""
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"process {pid} is gone") from gone
    try:
        connection = namespaces.call(
            namespace, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 4)
        )
    finally:
        os.close(namespace)
    with connection:
        families = (socket.AF_INET, socket.AF_INET6)
        tcp = [_tcp(message) for family in families for message in _dump(connection, _inet(family, socket.IPPROTO_TCP))]
        udp = [_tcp(message) for family in families for message in _dump(connection, _inet(family, socket.IPPROTO_UDP))]
        unix = [
            _unix(message)
            for message in _dump(connection, struct.pack("<BBHIIIII", 1, 0, 0, _ALL_STATES, 0, _UDIAG_SHOW, 0, 0))
        ]
    netlink = {int(row[9]): int(row[4]) for row in _rows(pid, "netlink")}
    packet = {int(row[8]) for row in _rows(pid, "packet")}
    return Tables({one.inode: one for one in unix}, tcp, netlink, packet | {one.inode for one in udp})


def _rows(pid: int, table: str) -> list[list[str]]:
    return [line.split() for line in proctree.read(pid, pid, f"net/{table}").splitlines()[1:]]


def _inet(family: int, protocol: int) -> bytes:
    return struct.pack("<BBBBI48x", family, protocol, _WITH_INFO, 0, _ALL_STATES)


def _dump(connection: socket.socket, request: bytes) -> Iterator[bytes]:
    """The answers to a dump request, without their netlink headers. A family that the kernel lacks has no sockets."""
    connection.send(struct.pack("<IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
    while True:
        data = connection.recv(1 << 18)
        while data:
            size, kind = struct.unpack_from("<IH", data)
            if kind in (_DONE, _ERROR):
                return
            yield data[16:size]
            data = data[(size + 3) & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        size, kind = struct.unpack_from("<HH", data)
        if size < 4:
            break
        found[kind & 0x3FFF] = data[4:size]
        data = data[(size + 3) & ~3 :]
    return found


def _unix(message: bytes) -> UnixSocket:
    _, _, state, _, inode = struct.unpack_from("<BBBBI", message)
    attributes = _attributes(message[16:])
    icons = attributes.get(_UNIX_ICONS, b"")
    return UnixSocket(
        inode,
        state,
        attributes.get(_UNIX_NAME, b"").rstrip(b"\0").replace(b"\0", b"@").decode(errors="replace"),
        int.from_bytes(attributes.get(_UNIX_PEER, b""), "little"),
        struct.unpack(f"<{len(icons) // 4}I", icons),
        struct.unpack_from("<II", attributes[_UNIX_RQLEN])[1] if _UNIX_RQLEN in attributes else 0,
    )


def _tcp(message: bytes) -> TcpSocket:
    family, state = message[0], message[1]
    local_port, remote_port = struct.unpack_from(">HH", message, 4)
    size = 4 if family == socket.AF_INET else 16
    local, remote = (_address(message[start : start + size]) for start in (8, 24))
    backlog, inode = struct.unpack_from("<I", message, 56)[0], struct.unpack_from("<I", message, 68)[0]
    ulp = _attributes(_attributes(message[72:]).get(_INET_ULP, b"")).get(_ULP_NAME, b"")
    return TcpSocket(
        inode,
        state,
        (local, local_port),
        (remote, remote_port),
        backlog if state == LISTEN else 0,
        ulp.rstrip(b"\0").decode(errors="replace"),
    )


def _address(data: bytes) -> str:
    """IPv4 also where the socket is of IPv6 (`::ffff:a.b.c.d`), so that both sides of a connection look alike."""
    address = ip_address(data)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
