"""The two captured ends of a connection made to agree (core/connections.py)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stasis.core.connections import Connection, FourTuple, State, address, aliases_in_use, mend
from stasis.errors import CheckpointFailed

A, B, OUT = address("10.0.0.1"), address("fd00::2"), address("192.0.2.9")
GANG = {A, B}
ENDS = FourTuple(A, 4000, B, 29500)
MODULUS = 1 << 32

lengths = st.integers(0, 100_000)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Connection, Connection]:
    """Two ends of one connection, as any run of a correct TCP may leave them when nothing moves any more.

    Per direction: bytes written, of those sent, of those received, of those acknowledged (as the sender knows).
    """
    ends: list[dict[str, int]] = [{"inode": 11}, {"inode": 22}]
    fins: list[tuple[bool, bool, bool]] = []
    for sender, receiver in ((0, 1), (1, 0)):
        start = draw(st.integers(0, MODULUS - 1))  # sequence numbers wrap
        written = draw(lengths)
        sent = draw(st.integers(0, written))
        received = draw(st.integers(0, sent))
        known = draw(st.integers(0, received))
        fin = draw(st.booleans())
        fin_received = fin and received == written and draw(st.booleans())
        fin_known = fin_received and known == written and draw(st.booleans())
        fins.append((fin, fin_received, fin_known))
        last_update = draw(st.integers(0, received))  # of the window the receiver offered
        offered = max(draw(lengths), received - last_update)
        stale = draw(lengths)
        ends[sender] |= {
            "outq_seq": (start + written + fin) % MODULUS,
            "outq_len": written - known,
            "unsq_len": written - sent,
            "snd_wnd": stale,
            "snd_wscale": draw(st.integers(2, 14)),
            "max_window": draw(st.integers(stale, 200_000)),
        }
        ends[receiver] |= {
            "inq_seq": (start + received + fin_received) % MODULUS,
            "inq_len": draw(st.integers(0, received)),
            "rcv_wup": (start + last_update) % MODULUS,
            "rcv_wnd": offered,
        }
    states = [_state(fins[0], fins[1]), _state(fins[1], fins[0])]
    a = Connection(ends=ENDS, state=states[0], **ends[0])
    return a, Connection(ends=ENDS.reversed, state=states[1], **ends[1])


def _state(mine: tuple[bool, bool, bool], theirs: tuple[bool, bool, bool]) -> State:
    fin, _, acknowledged = mine
    received = theirs[1]
    if not fin:
        return State.CLOSE_WAIT if received else State.ESTABLISHED
    if received:  # CLOSING and LAST_ACK differ only in which FIN came first; acknowledged ones are gone
        return State.CLOSE if acknowledged else State.LAST_ACK
    return State.FIN_WAIT2 if acknowledged else State.FIN_WAIT1


@settings(max_examples=200, deadline=None)
@given(histories())
def test_mended_ends_have_nothing_in_flight_and_lose_nothing(history: tuple[Connection, Connection]) -> None:
    mended = mend({0: [history[0]], 1: [history[1]]}, GANG)
    assert not any(mended.outside.values()) or State.CLOSE in {c.state for c in history}
    for rank, (end, peer) in enumerate((history, history[::-1])):
        fix = mended.fixes[rank].get(end.inode)
        if State.CLOSE in (end.state, peer.state):
            assert fix is None
            continue
        assert fix is not None
        assert fix.cut + fix.outq_len == end.outq_len
        # The first byte that remains is the one the peer expects next.
        assert (end.unacknowledged + fix.cut) % MODULUS == peer.expected
        assert fix.outq_len >= end.unsq_len
        assert fix.snd_wnd is not None
        assert fix.max_window is not None
        assert fix.snd_wnd >= 0
        assert fix.max_window >= max(fix.snd_wnd, end.max_window or 0)
        assert (peer.inq_seq + fix.snd_wnd - (peer.rcv_wup or 0)) % MODULUS == peer.rcv_wnd
        if end.state in (State.CLOSE_WAIT, State.LAST_ACK):
            # What CRIU's packet says of the peer's window is what the peer offered, in its units.
            assert fix.rcv_wnd is not None
            assert fix.rcv_wnd < 1 << 16
            assert 0 <= fix.snd_wnd - (fix.rcv_wnd << end.snd_wscale) < 1 << end.snd_wscale
        else:
            assert fix.rcv_wnd is None


@settings(max_examples=100, deadline=None)
@given(histories())
def test_mending_twice_changes_nothing_more(history: tuple[Connection, Connection]) -> None:
    fixes = mend({0: [history[0]], 1: [history[1]]}, GANG).fixes
    once = [
        replace(c, outq_len=f.outq_len, unsq_len=f.outq_len, snd_wnd=f.snd_wnd, max_window=f.max_window)
        if (f := fixes[rank].get(c.inode))
        else c
        for rank, c in enumerate(history)
    ]
    again = mend({0: [once[0]], 1: [once[1]]}, GANG).fixes
    for rank, c in enumerate(once):
        if fix := again[rank].get(c.inode):
            assert (fix.cut, fix.outq_len, fix.snd_wnd, fix.max_window) == (
                0,
                c.outq_len,
                c.snd_wnd,
                c.max_window,
            )


def ends(**changes: object) -> Connection:
    base = Connection(ENDS, 11, State.ESTABLISHED, inq_seq=500, outq_seq=1100, outq_len=100, unsq_len=40)
    return replace(base, **changes)  # type: ignore[arg-type]


def other(**changes: object) -> Connection:
    base = Connection(ENDS.reversed, 22, State.ESTABLISHED, inq_seq=1030, outq_seq=500)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_what_the_peer_has_is_cut_and_the_rest_was_never_sent() -> None:
    fix = mend({0: [ends(snd_wnd=0, max_window=50)], 1: [other(rcv_wup=1000, rcv_wnd=400)]}, GANG).fixes[0][11]
    assert (fix.cut, fix.outq_len, fix.snd_wnd, fix.max_window) == (30, 70, 370, 370)


@pytest.mark.parametrize("expected", [999, 1061])  # before the queue; beyond what was sent
def test_a_contradiction_names_both_ends(expected: int) -> None:
    with pytest.raises(CheckpointFailed, match=r"10\.0\.0\.1:4000 -> \[fd00::2\]:29500.*contradict"):
        mend({0: [ends()], 1: [other(inq_seq=expected)]}, GANG)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (State.ESTABLISHED, State.CLOSE_WAIT),  # a FIN that nobody sent
        (State.FIN_WAIT2, State.ESTABLISHED),  # a FIN acknowledged that never came
        (State.FIN_WAIT1, State.CLOSE_WAIT),  # a FIN before the data
    ],
)
def test_a_fin_that_cannot_have_been_is_a_contradiction(mine: State, theirs: State) -> None:
    fin = mine is not State.ESTABLISHED
    received = theirs is State.CLOSE_WAIT
    with pytest.raises(CheckpointFailed, match="contradict"):
        mend(
            {0: [ends(state=mine, outq_seq=1100 + fin)], 1: [other(state=theirs, inq_seq=1030 + received)]},
            GANG,
        )


def test_connections_to_others_are_listed_for_closing() -> None:
    outward = FourTuple(A, 4000, OUT, 443)
    sidecar = FourTuple(A, 4001, B, 9090)
    asking = FourTuple(A, 4002, OUT, 80)
    table = [
        ends(ends=outward, inode=1),
        ends(ends=sidecar, inode=2),
        ends(ends=asking, inode=3, state=State.SYN_SENT),
        ends(ends=outward._replace(local_port=4003), inode=4, state=State.CLOSE_WAIT),  # reads its end of file
        ends(ends=ENDS._replace(local_port=4004), inode=5, state=State.SYN_SENT),  # asks the peer again
        ends(ends=outward._replace(local_port=4005), inode=6, state=State.CLOSE),
    ]
    mended = mend({0: table, 1: []}, GANG)
    assert mended.outside == {0: [outward, sidecar, asking], 1: []}
    assert not mended.fixes[0]


def test_equal_connections_over_lo_of_two_ranks_are_not_confused() -> None:
    loopback = FourTuple(address("127.0.0.1"), 5000, address("127.0.0.1"), 6000)
    tables = {
        rank: [
            ends(ends=loopback, inode=1, inq_seq=500 + rank, outq_seq=1100 + rank),
            other(ends=loopback.reversed, inode=2, inq_seq=1030 + rank, outq_seq=500 + rank),
        ]
        for rank in (0, 7)
    }
    assert {rank: fixes[1].cut for rank, fixes in mend(tables, GANG).fixes.items()} == {0: 30, 7: 30}


def test_ends_that_call_each_other_by_old_and_new_addresses_belong_together() -> None:
    new_a, new_b = address("10.0.0.101"), address("fd00::102")
    aliases = {new_a: A, new_b: B}
    mine = ends()  # made by old addresses, and seen by the peer under new ones
    theirs = other(ends=FourTuple(new_b, 29500, new_a, 4000))
    mended = mend({0: [mine], 1: [theirs]}, GANG, aliases)
    assert mended.fixes[0][11].cut == 30
    assert set(mended.fixes[1]) == {22}
    assert not any(mended.outside.values())
    assert mend({0: [mine], 1: [theirs]}, GANG).outside == {0: [mine.ends], 1: [theirs.ends]}


def test_an_alias_is_carried_on_while_something_names_it() -> None:
    aliases = {address(f"10.0.1.{host}"): A for host in range(4)}
    one, two, three, _ = aliases
    table = [ends(ends=ENDS._replace(local=one)), ends(ends=ENDS._replace(remote=two))]
    assert aliases_in_use([table], [three], aliases) == {one: A, two: A, three: A}


def test_a_table_survives_json() -> None:
    table = [ends(), ends(ends=ENDS.reversed, state=State.FIN_WAIT2, snd_wnd=7)]
    assert [Connection.from_dict(d) for d in json.loads(json.dumps([c.as_dict() for c in table]))] == table


def test_a_mapped_address_is_the_address_itself() -> None:
    assert address("::ffff:10.0.0.1") == A
    assert address(bytes(10) + b"\xff\xff\x0a\x00\x00\x01") == A
