"""What mending finds, applied to the image of a connection's queues."""

from __future__ import annotations

import pytest

from stasis.agent.criu_images import Entry, Image, ImageCodec
from stasis.agent.network import images
from stasis.core.connections import Connection, Fix, FourTuple, State, address
from stasis.errors import Corrupt

MAPPED = [0, 0, 0xFFFF0000, int.from_bytes(bytes([10, 0, 0, 1]), "little")]


def queues(codec: ImageCodec) -> bytes:
    message = codec.type("tcp_stream_entry")(
        inq_len=4, inq_seq=500, outq_len=8, outq_seq=1008, unsq_len=2, opt_mask=0, snd_wscale=7, mss_clamp=1448,
        snd_wnd=10, max_window=20, rcv_wnd=30, rcv_wup=495,
    )  # fmt: skip
    return codec.dump(Image("TCP_STREAM", [Entry(message, b"read" + b"sent" + b"send")]))


def files(codec: ImageCodec, **changes: object) -> bytes:
    fields = {"id": 7, "ino": 0xAB, "family": 10, "type": 1, "proto": 6, "state": 1, "src_port": 4000, "dst_port": 80}
    fields |= {"flags": 0, "backlog": 0, "src_addr": MAPPED, "dst_addr": MAPPED, **changes}
    entry = codec.type("file_entry")(type="INETSK", id=7, isk=fields)
    for part in ("fown", "opts"):
        getattr(entry.isk, part).SetInParent()
    return codec.dump(Image("FILES", [Entry(_complete(entry))]))


def _complete(entry: object) -> object:
    isk = entry.isk  # type: ignore[attr-defined]
    for message in (isk.fown, isk.opts):
        for field in message.DESCRIPTOR.fields:
            if field.is_required:
                setattr(message, field.name, 0)
    return entry


def test_the_head_of_the_send_queue_is_cut_and_the_rest_unsent(codec: ImageCodec) -> None:
    fix = Fix(cut=3, outq_len=5, snd_wnd=40, max_window=41)
    entry = codec.load("mended", images.apply(codec, queues(codec), fix)).entries[0]
    m = entry.message
    assert entry.extra == b"read" + b"tsend"
    assert (m.inq_len, m.outq_len, m.unsq_len, m.outq_seq) == (4, 5, 5, 1008)
    assert (m.snd_wnd, m.max_window, m.rcv_wnd, m.rcv_wup) == (40, 41, 30, 495)


def test_connections_are_read_with_their_plain_addresses(codec: ImageCodec) -> None:
    found = images.connections(codec, {"files.img": files(codec), "tcp-stream-ab.img": queues(codec)}.__getitem__)
    here = address("10.0.0.1")
    assert found == [
        Connection(FourTuple(here, 4000, here, 80), 0xAB, State(1), 500, 4, 1008, 8, 2, 10, 20, 30, 495, 7),
    ]


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"state": 10, "dst_port": 0}, [("tcp", 4000)]),
        ({"state": 10, "dst_port": 0, "src_addr": [0, 0, 0, 0]}, []),  # every address
        ({"proto": 17, "type": 2, "state": 7}, [("udp", 4000)]),
        ({}, []),
    ],
)
def test_sockets_that_wait_at_an_address_are_found(
    codec: ImageCodec, changes: dict[str, object], seen: list[tuple[str, int]]
) -> None:
    found = images.bound(codec, {"files.img": files(codec, **changes)}.__getitem__)
    assert [(b.protocol, b.port) for b in found] == seen
    assert all(b.address == address("10.0.0.1") for b in found)


@pytest.mark.parametrize("changes", [{"state": 99}, {"src_addr": []}])
def test_what_no_connection_can_be_is_refused(codec: ImageCodec, changes: dict[str, object]) -> None:
    read = {"files.img": files(codec, **changes), "tcp-stream-ab.img": queues(codec)}.__getitem__
    with pytest.raises(Corrupt, match=r"\.img"):
        images.connections(codec, read)


def test_a_fix_for_another_image_is_refused(codec: ImageCodec) -> None:
    with pytest.raises(Corrupt, match="send queue"):
        images.apply(codec, queues(codec), Fix(cut=3, outq_len=6))
