"""Let a restored gang's connections go, so that data moves within milliseconds.

A restored socket knows no round-trip time: what it sends first and loses comes again after 3 s only. So nothing may be
sent before every rank's network is open, and then everything at once: the locks go in all ranks, then each socket sends
what it holds and probes its peer's window, then the tasks run. All that takes time is done in advance.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

from stasis.agent.network import lock
from stasis.agent.network.nft import Nft
from stasis.agent.network.sockets import TcpSocket, TcpSockets
from stasis.core.connections import State


class Gate:
    """One restored rank, its tasks stopped or frozen and its network locked.

    `pids` are its processes, `netns_fd` its network namespace. Use: make it in every rank; `unlock` in every rank; when
    all have, `poke` in every rank; then let the tasks run.
    """

    def __init__(self, pids: Iterable[int], netns_fd: int) -> None:
        with contextlib.ExitStack() as opened:
            self.sockets = opened.enter_context(TcpSockets(pids))
            self._nft = opened.enter_context(Nft(netns_fd))
            self._opened = opened.pop_all()

    def unlock(self) -> None:
        """Remove the lock. Data in the queues stays where it is until `poke`. Raises StasisError."""
        self._nft.run(lock.UNLOCK)

    def poke(self) -> None:
        """Send what is unsent, and ask each peer for its window. Raises OSError."""
        for s in self._connected():
            if not s.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK):
                s.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)  # pushes pending frames
            s.probe()

    def _connected(self) -> Iterator[TcpSocket]:
        return (s for s in self.sockets if s.state not in (State.LISTEN, State.CLOSE, State.SYN_SENT))

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
