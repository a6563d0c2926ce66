"""Socket options that CRIU does not carry: read at a dump, set again after the restore.

TCP_USER_TIMEOUT and keepalives are also switched off while a tree is frozen and its network locked: they would kill the
connections. (CRIU carries SO_KEEPALIVE, but switched off.)
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from stasis.agent.network.sockets import TcpSocket
from stasis.core.connections import State

_TCP = socket.IPPROTO_TCP
_OPTIONS = {
    "TCP_USER_TIMEOUT": (_TCP, socket.TCP_USER_TIMEOUT),
    "TCP_SYNCNT": (_TCP, socket.TCP_SYNCNT),
    "TCP_LINGER2": (_TCP, socket.TCP_LINGER2),
    "TCP_NOTSENT_LOWAT": (_TCP, socket.TCP_NOTSENT_LOWAT),
    "TCP_DEFER_ACCEPT": (_TCP, socket.TCP_DEFER_ACCEPT),
    "SO_KEEPALIVE": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
}

Options = dict[str, dict[str, int]]  # by "pid/fd" in the tree, and the option's name; for JSON


def read(sockets: Iterable[TcpSocket]) -> Options:
    """The options of each socket; unsigned, as the kernel gives them (ms for TCP_USER_TIMEOUT)."""
    return {_key(s): {name: s.socket.getsockopt(*option) for name, option in _OPTIONS.items()} for s in sockets}


def hold(sockets: Iterable[TcpSocket]) -> None:
    """Switch off what would let connections die of the freeze. `read` the options before, `write` them after."""
    for s in sockets:
        for name in ("TCP_USER_TIMEOUT", "SO_KEEPALIVE"):
            s.socket.setsockopt(*_OPTIONS[name], 0)


def write(sockets: Iterable[TcpSocket], options: Mapping[str, Mapping[str, int]]) -> None:
    """Set the options that differ from `options`; sockets that it does not name stay as they are."""
    for s in sockets:
        for name, value in options.get(_key(s), {}).items():
            option = _OPTIONS[name]
            if s.socket.getsockopt(*option) != value and (name != "TCP_DEFER_ACCEPT" or s.state is State.LISTEN):
                s.socket.setsockopt(*option, value)


def _key(s: TcpSocket) -> str:
    return f"{s.pid}/{s.fd}"
