"""A gang's TCP connections as captured, and how two captured ends are made to agree.

The two ends of a connection are captured by two dumps. What one end still counts as in flight the other may have
received, and the window that a sender remembers may be older than the one its peer last offered. Restored so, a socket
starts with a retransmission timer of 3 s or waits as long for a window probe; mended, it starts with nothing in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

from stasis.errors import CheckpointFailed

IpAddress = IPv4Address | IPv6Address


def address(text: str | bytes) -> IpAddress:
    """An address, from its text or from 4 or 16 bytes. An IPv4 address mapped into IPv6 is the IPv4 address."""
    value = ip_address(text)
    mapped = value.ipv4_mapped if isinstance(value, IPv6Address) else None
    return mapped or value


class FourTuple(NamedTuple):
    """A TCP connection as one end names it."""

    local: IpAddress
    local_port: int
    remote: IpAddress
    remote_port: int

    @property
    def reversed(self) -> FourTuple:
        return FourTuple(self.remote, self.remote_port, self.local, self.local_port)

    def __str__(self) -> str:
        return f"{_end(self.local, self.local_port)} -> {_end(self.remote, self.remote_port)}"


def _end(ip: IpAddress, port: int) -> str:
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


class State(IntEnum):
    """The kernel's TCP states (include/net/tcp_states.h)."""

    ESTABLISHED = 1
    SYN_SENT = 2
    SYN_RECV = 3
    FIN_WAIT1 = 4
    FIN_WAIT2 = 5
    TIME_WAIT = 6
    CLOSE = 7
    CLOSE_WAIT = 8
    LAST_ACK = 9
    LISTEN = 10
    CLOSING = 11


_FIN_SENT = {State.FIN_WAIT1, State.FIN_WAIT2, State.CLOSING, State.LAST_ACK}  # or queued behind unsent data
_FIN_ACKNOWLEDGED = {State.FIN_WAIT2}
_FIN_RECEIVED = {State.CLOSE_WAIT, State.LAST_ACK, State.CLOSING}
_CONNECTED = _FIN_SENT | _FIN_RECEIVED | {State.ESTABLISHED}

_MODULUS = 1 << 32


@dataclass(frozen=True)
class Connection:
    """One end of a captured TCP connection. Sequence numbers are the kernel's, modulo 2**32; lengths are bytes.

    `outq_seq` is behind the last byte queued, `inq_seq` behind the last byte received (both count a FIN as one);
    the queues hold data alone. Windows are None where the kernel that dumped did not tell them.
    """

    ends: FourTuple
    inode: int  # names the image of its queues
    state: State
    inq_seq: int = 0
    inq_len: int = 0
    outq_seq: int = 0
    outq_len: int = 0
    unsq_len: int = 0  # the part of the send queue that was never sent
    snd_wnd: int | None = None
    max_window: int | None = None
    rcv_wnd: int | None = None
    rcv_wup: int | None = None
    snd_wscale: int = 0  # the peer counts its window in units of 2**snd_wscale

    @property
    def in_flight(self) -> int:
        """Bytes that this end has sent and its peer, as far as it knows, has not received."""
        return self.outq_len - self.unsq_len

    @property
    def unacknowledged(self) -> int:
        """Sequence number of the first byte in the send queue."""
        return (self.outq_seq - (self.state in _FIN_SENT) - self.outq_len) % _MODULUS

    @property
    def expected(self) -> int:
        """Sequence number of the peer's next byte of data."""
        return (self.inq_seq - (self.state in _FIN_RECEIVED)) % _MODULUS

    @property
    def offered(self) -> int | None:
        """Bytes beyond `inq_seq` that this end last allowed its peer to send."""
        if self.rcv_wnd is None or self.rcv_wup is None:
            return None
        return max(0, _signed(self.rcv_wup + self.rcv_wnd - self.inq_seq))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return asdict(self) | {"ends": [str(self.ends[0]), self.ends[1], str(self.ends[2]), self.ends[3]]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Connection:
        local, local_port, remote, remote_port = data["ends"]
        ends = FourTuple(address(local), local_port, address(remote), remote_port)
        return cls(**{**data, "ends": ends, "state": State(data["state"])})


@dataclass(frozen=True)
class Fix:
    """What to change in the image of a connection's queues. None: leave as it is."""

    cut: int  # bytes to drop from the head of the send queue: the peer has them
    outq_len: int  # what remains, all of it to be unsent
    snd_wnd: int | None = None
    max_window: int | None = None
    rcv_wnd: int | None = None
    rcv_wup: int | None = None


@dataclass(frozen=True)
class Mended:
    fixes: dict[int, dict[int, Fix]]  # by rank and inode
    outside: dict[int, list[FourTuple]]  # by rank: to be closed at a restore


def mend(
    tables: Mapping[int, Sequence[Connection]],
    addresses: Collection[IpAddress],
    aliases: Mapping[IpAddress, IpAddress] | None = None,
) -> Mended:
    """Make the two ends of each connection within a gang agree.

    `tables` holds every rank's connections, `addresses` those by which the ranks know each other. `aliases` leads from
    the address of a later pod to the one that its rank is known by first: when addresses are translated, the two ends
    of a new connection may call each other differently.

    A connection whose other end is in no rank's tree is `outside`, also one to a sidecar of a rank; but not one which
    that end has closed (the program reads its end of file), nor a connection request to a rank (CRIU asks again).

    Raises CheckpointFailed, naming both ends, where no history of a connection leads to what was captured: one of
    them was captured while the other could still reach it.
    """
    known = aliases or {}
    within = {rank: {c.ends: c for c in table} for rank, table in tables.items()}
    between = [c for table in tables.values() for c in table if not c.ends.remote.is_loopback]
    anywhere = {_canonical(c.ends, known): c for c in between} | {c.ends: c for c in between}
    mended = Mended({rank: {} for rank in tables}, {rank: [] for rank in tables})
    for rank, table in tables.items():
        for end in table:
            back = end.ends.reversed
            peer = within[rank].get(back) or anywhere.get(back) or anywhere.get(_canonical(back, known))
            if end.state in _CONNECTED:
                if peer is not None and peer.state in _CONNECTED:
                    mended.fixes[rank][end.inode] = _fix(end, peer)
                elif end.state not in _FIN_RECEIVED:
                    mended.outside[rank].append(end.ends)
            elif end.state is State.SYN_SENT:
                remote = end.ends.remote
                if not remote.is_loopback and remote not in addresses and remote not in known:
                    mended.outside[rank].append(end.ends)
    return mended


def aliases_in_use(
    tables: Iterable[Sequence[Connection]], bound: Iterable[IpAddress], aliases: Mapping[IpAddress, IpAddress]
) -> dict[IpAddress, IpAddress]:
    """Those of `aliases` that a connection still names, or that a listening socket is `bound` to.

    The next restore must translate them, and no others.
    """
    named = {ip for table in tables for c in table for ip in (c.ends.local, c.ends.remote)} | set(bound)
    return {alias: first for alias, first in aliases.items() if alias in named}


def _canonical(ends: FourTuple, aliases: Mapping[IpAddress, IpAddress]) -> FourTuple:
    return ends._replace(
        local=aliases.get(ends.local, ends.local),
        remote=aliases.get(ends.remote, ends.remote),
    )


def _fix(end: Connection, peer: Connection) -> Fix:
    received = _signed(peer.expected - end.unacknowledged)
    if not 0 <= received <= end.in_flight:
        raise CheckpointFailed(
            f"the two ends of connection {end.ends} contradict each other: {end.ends.local} holds {end.in_flight} "
            f"bytes in flight from sequence number {end.unacknowledged}, {end.ends.remote} expects {peer.expected}"
        )
    fin_sent, fin_received = end.state in _FIN_SENT, peer.state in _FIN_RECEIVED
    if (fin_received and (not fin_sent or received < end.outq_len)) or (
        end.state in _FIN_ACKNOWLEDGED and not fin_received
    ):
        raise CheckpointFailed(
            f"the two ends of connection {end.ends} contradict each other: {end.ends.local} is {end.state.name} with "
            f"{end.outq_len - received} bytes to send, {end.ends.remote} is {peer.state.name}"
        )
    fix = Fix(received, end.outq_len - received)
    if peer.offered is None or end.max_window is None:
        return fix
    # The kernel refuses a window that is larger than the largest seen.
    fix = replace(fix, snd_wnd=peer.offered, max_window=max(end.max_window, peer.offered))
    if end.state in _FIN_RECEIVED:
        # CRIU restores a received FIN by a packet that carries, for the peer's window, the low 16 bits of our own. No
        # more data comes, so our own is of no use, and is set to what makes the peer's come out right.
        window = min(peer.offered >> end.snd_wscale, 0xFFFF)
        fix = replace(fix, rcv_wnd=window, rcv_wup=end.inq_seq)
    return fix


def _signed(difference: int) -> int:
    """A difference of sequence numbers, as a number from -2**31 on."""
    return (difference + (_MODULUS >> 1)) % _MODULUS - (_MODULUS >> 1)
