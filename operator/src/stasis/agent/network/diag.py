"""The kernel's own list of TCP sockets of a network namespace, and their destruction (sock_diag(7)).

It also shows what no process holds: connections that a listener has not accepted, and closed ones that still send.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from stasis.agent import namespaces
from stasis.core.connections import FourTuple, IpAddress, State, address
from stasis.errors import Finding, StasisError

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 0x1, 0x4, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_ID = struct.Struct("!HH16s16s4s8s")  # ports, addresses, interface, cookie
_NO_COOKIE = b"\xff" * 8
_CLOSED = (State.FIN_WAIT1, State.FIN_WAIT2, State.TIME_WAIT, State.CLOSING, State.LAST_ACK)
_REST = struct.Struct("=IIIII")  # expires, receive queue, send queue, uid, inode


@dataclass(frozen=True)
class Listed:
    ends: FourTuple
    state: State
    received: int  # bytes in the receive queue
    queued: int  # bytes in the send queue; a FIN counts as one
    inode: int  # 0: no process holds it


def listed(netns_fd: int) -> list[Listed]:
    """All connected TCP sockets of the namespace. Raises StasisError."""
    with _open(netns_fd) as link:
        return [s for family in (socket.AF_INET, socket.AF_INET6) for s in _list(link, family)]


def destroy(netns_fd: int, connections: Iterable[FourTuple]) -> int:
    """Abort connections: the program gets ECONNABORTED at once, the peer a reset. Returns how many there were.

    Needs CAP_NET_ADMIN and a kernel with CONFIG_INET_DIAG_DESTROY. Raises StasisError.
    """
    destroyed = 0
    with _open(netns_fd) as link:
        for connection in connections:
            link.send(_message(_SOCK_DESTROY, _NLM_F_REQUEST | _NLM_F_ACK, _request(connection)))
            _, payload = next(_replies(link))
            number = -struct.unpack_from("=i", payload)[0]
            if number not in (0, errno.ENOENT):
                raise StasisError(f"connection {connection} cannot be closed: {os.strerror(number)}")
            destroyed += number == 0
    return destroyed


def forget_closed(netns_fd: int, addresses: Collection[IpAddress]) -> int:
    """Destroy what is left in the kernel of connections with a gang, and over lo, whose processes are gone: without it
    they keep their ports, for a minute or until the peer answers. Returns how many there were. Raises StasisError."""
    gang = set(addresses)
    left = [s.ends for s in listed(netns_fd) if not s.inode and s.state in _CLOSED]
    return destroy(netns_fd, (ends for ends in left if ends.remote in gang or ends.remote.is_loopback))


def unsettled(netns_fd: int, addresses: Collection[IpAddress], listening: Collection[int]) -> list[Finding]:
    """Connections of a frozen gang that no image can hold, since no process holds them.

    `addresses` are the gang's, `listening` the ports of this tree's listeners. They settle within milliseconds when
    the tree runs on: thaw, and try again. Those with peers outside do not count: CRIU leaves them out
    (--skip-in-flight), and their peers see a reset.
    """
    gang = set(addresses)
    findings = []
    for s in listed(netns_fd):
        if s.inode or not (s.ends.remote in gang or s.ends.remote.is_loopback):
            continue
        if s.state is State.SYN_RECV and s.ends.local_port in listening:
            cause = "it is being opened"
        elif s.state in (State.ESTABLISHED, State.CLOSE_WAIT) and s.ends.local_port in listening:
            cause = "the program has not accepted it yet"
        elif s.state in (State.FIN_WAIT1, State.CLOSING, State.LAST_ACK):
            cause = f"the program has closed it, {s.queued} bytes are still to be delivered"
        else:
            continue
        findings.append(Finding(cause, "let the gang run on a little and try again", where=f"connection {s.ends}"))
    return findings


def _open(netns_fd: int) -> socket.socket:
    return namespaces.call(netns_fd, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG))


def _message(kind: int, flags: int, payload: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(payload), kind, flags, 0, 0) + payload


def _request(connection: FourTuple) -> bytes:
    local, local_port, remote, remote_port = connection
    family = socket.AF_INET if local.version == 4 else socket.AF_INET6
    sockid = _ID.pack(local_port, remote_port, local.packed, remote.packed, bytes(4), _NO_COOKIE)
    return _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + sockid


def _list(link: socket.socket, family: int) -> Iterator[Listed]:
    states = 0xFFFFFFFF & ~(1 << State.LISTEN | 1 << State.CLOSE)
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, states) + bytes(_ID.size)
    link.send(_message(_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, request))
    size = 4 if family == socket.AF_INET else 16
    for kind, payload in _replies(link):
        if kind == _NLMSG_DONE:
            return
        if kind == _NLMSG_ERROR:
            number = -struct.unpack_from("=i", payload)[0]
            raise StasisError(f"the kernel does not list its TCP sockets: {os.strerror(number)}")
        local_port, remote_port, local, remote, _, _ = _ID.unpack_from(payload, 4)
        _, received, queued, _, inode = _REST.unpack_from(payload, 4 + _ID.size)
        ends = FourTuple(address(local[:size]), local_port, address(remote[:size]), remote_port)
        # A connection request shows as SYN_RECV (3), or as the kernel's own NEW_SYN_RECV (12).
        state = State.SYN_RECV if payload[1] == 12 else State(payload[1])
        yield Listed(ends, state, received, queued, inode)


def _replies(link: socket.socket) -> Iterator[tuple[int, bytes]]:
    while True:
        data = link.recv(1 << 18)
        offset = 0
        while offset < len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
            yield kind, data[offset + _HEADER.size : offset + length]
            offset += (length + 3) & ~3
