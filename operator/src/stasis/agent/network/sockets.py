"""The TCP sockets of a process tree, held by descriptors of our own (pidfd_getfd), and drained.

Needs CAP_SYS_PTRACE. Works on frozen processes: their kernel goes on to acknowledge and to send.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from stasis.agent.descriptors import shelved
from stasis.core.connections import FourTuple, IpAddress, State, address
from stasis.errors import StasisError

_PIDFD_GETFD = 438
_SIOCINQ, _SIOCOUTQ, _SIOCOUTQNSD = 0x541B, 0x5411, 0x894B
_TCP_INFO_UNACKED = 24  # offset in struct tcp_info, of a u32; its first byte is the state
TCP_REPAIR = 19  # linux/tcp.h

_POLL = 0.001  # seconds
_PROBE_AFTER = 0.002  # seconds: what a quick link acknowledges by itself is acknowledged by then

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class TcpSocket:
    """A socket of the tree. `pid` (in the tree's own PID namespace) and `fd` name it also after a restore."""

    socket: socket.socket
    inode: int
    pid: int
    fd: int

    @property
    def state(self) -> State:
        return State(self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])

    @property
    def ends(self) -> FourTuple | None:
        """None when it is not connected, nor was."""
        try:
            local, remote = self.socket.getsockname(), self.socket.getpeername()
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.EINVAL):
                return None
            raise
        return FourTuple(_address(local[0]), local[1], _address(remote[0]), remote[1])

    @property
    def received(self) -> int:
        """Bytes that the program has not read yet."""
        return self._queue(_SIOCINQ)

    @property
    def queued(self) -> int:
        """Bytes that the peer has not acknowledged; a FIN counts as one."""
        return self._queue(_SIOCOUTQ)

    @property
    def unsent(self) -> int:
        """The part of `queued` that was never sent: a full window, or the network was locked."""
        return self._queue(_SIOCOUTQNSD)

    @property
    def in_flight(self) -> int:
        """Sequence numbers sent and not acknowledged; more than 0 also while a segment without data is."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_UNACKED + 4)
        segments = struct.unpack_from("=I", info, _TCP_INFO_UNACKED)[0]
        return max(self.queued - self.unsent, int(segments > 0))

    def probe(self) -> None:
        """Have the peer's kernel answer at once with what it has received and its window. Raises OSError.

        Leaving repair mode sends a window probe. It also clears SO_REUSEADDR, which is put back.
        """
        reuse = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        self.socket.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)

    def _queue(self, request: int) -> int:
        value = array.array("i", [0])
        fcntl.ioctl(self.socket.fileno(), request, value)
        return value[0]


class TcpSockets:
    """All TCP sockets of a tree, each once. Close it: descriptors kept here keep connections alive."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Take them from the processes `pids` (as we see them). A process that ended meanwhile has none.

        Raises StasisError when a process cannot be looked into.
        """
        self._sockets: list[TcpSocket] = []
        seen: set[int] = set()
        try:
            for pid in pids:
                self._take(pid, seen)
        except BaseException:
            self.close()
            raise

    def _take(self, pid: int, seen: set[int]) -> None:
        try:
            inner = _innermost_pid(pid)
            pidfd = os.pidfd_open(pid)
        except (FileNotFoundError, ProcessLookupError):
            return
        try:
            for fd, inode in _socket_inodes(pid):
                if inode in seen:
                    continue
                seen.add(inode)
                copy = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
                if copy < 0:
                    number = ctypes.get_errno()
                    if number in (errno.EBADF, errno.ESRCH):
                        continue
                    raise StasisError(f"descriptor {fd} of process {pid} cannot be taken: {os.strerror(number)}")
                held = socket.socket(fileno=shelved(copy))
                if held.family in (socket.AF_INET, socket.AF_INET6) and _is_tcp(held):
                    self._sockets.append(TcpSocket(held, inode, inner, fd))
                else:
                    held.close()
        finally:
            os.close(pidfd)

    def __iter__(self) -> Iterator[TcpSocket]:
        return iter(self._sockets)

    def __len__(self) -> int:
        return len(self._sockets)

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().socket.close()

    def __enter__(self) -> TcpSockets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connected(self, addresses: Collection[IpAddress]) -> list[TcpSocket]:
        """Those with a peer at one of `addresses` or within the namespace, in a state in which data can move."""
        known = set(addresses)
        return [
            s
            for s in self
            if s.state not in (State.CLOSE, State.LISTEN, State.SYN_SENT)
            and (ends := s.ends)
            and (ends.remote in known or ends.remote.is_loopback)
        ]

    def listening(self) -> set[int]:
        """The ports on which the tree waits for connections."""
        return {s.socket.getsockname()[1] for s in self if s.state is State.LISTEN}

    def within(self, addresses: Collection[IpAddress]) -> list[FourTuple]:
        """The connections over lo: to loopback or to one of the namespace's own `addresses`. For the lock."""
        own = set(addresses)
        tuples = [ends for s in self if s.state is not State.LISTEN and (ends := s.ends)]
        return [t for t in tuples if t.remote.is_loopback or t.remote in own]


def drain(sockets: Iterable[TcpSocket], timeout: float) -> int:
    """Wait until nothing is in flight on any of `sockets`, or `timeout` seconds have passed.

    Returns what is still in flight then (sequence numbers, about bytes): 0 is drained. Data that the peer's full
    window keeps from being sent is not in flight. A peer whose program has not read what came puts its acknowledgement
    off by 40 ms: it is asked for it, once, since kernels answer such probes twice a second only.
    """
    left = list(sockets)
    began, probed = _now(), False
    while left := [s for s in left if s.in_flight]:
        now = _now()
        if now >= began + timeout:
            return sum(s.in_flight for s in left)
        if not probed and now >= began + _PROBE_AFTER:
            probed = True
            for s in left:
                s.probe()
        time.sleep(_POLL)
    return 0


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _address(text: str) -> IpAddress:
    return address(text.partition("%")[0])


def _is_tcp(s: socket.socket) -> bool:
    return s.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP and s.type == socket.SOCK_STREAM


def _innermost_pid(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def _socket_inodes(pid: int) -> Iterator[tuple[int, int]]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in sorted(names, key=int):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(name), int(target[8:-1])
