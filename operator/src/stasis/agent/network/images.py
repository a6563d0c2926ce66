"""A tree's TCP connections in CRIU's images: read them, and apply what mending found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stasis.agent.criu_images import ImageCodec
from stasis.agent.network.translate import Bound
from stasis.core.connections import Connection, Fix, FourTuple, IpAddress, State, address
from stasis.errors import Corrupt

_IPPROTO_TCP, _IPPROTO_UDP, _SOCK_STREAM = 6, 17, 1
_AF_INET = 2
_WINDOWS = ("snd_wnd", "max_window", "rcv_wnd", "rcv_wup")


def queues(inode: int) -> str:
    """The name of the image that holds a connection's queues."""
    return f"tcp-stream-{inode:x}.img"


def connections(codec: ImageCodec, read: Callable[[str], bytes]) -> list[Connection]:
    """The connections of one dump, those that were reset included. `read` gives an image's bytes by name.

    Raises Corrupt when the images are no images.
    """
    found = []
    for s in _inet_sockets(codec, read):
        if s.proto != _IPPROTO_TCP or s.type != _SOCK_STREAM or not s.dst_port:
            continue
        local, remote = (_address(s.family, words) for words in (s.src_addr, s.dst_addr))
        name = queues(s.ino)
        image = codec.load(name, read(name))
        if len(image.entries) != 1 or s.state not in State.__members__.values():
            raise Corrupt(f"{name}: not the queues of one connection")
        q = image.entries[0].message
        windows = {f: getattr(q, f) for f in _WINDOWS if q.HasField(f)}
        found.append(
            Connection(
                FourTuple(local, s.src_port, remote, s.dst_port),
                s.ino,
                State(s.state),
                q.inq_seq,
                q.inq_len,
                q.outq_seq,
                q.outq_len,
                q.unsq_len,
                **windows,
                snd_wscale=q.snd_wscale,
            )
        )
    return found


def apply(codec: ImageCodec, data: bytes, fix: Fix) -> bytes:
    """The image of a connection's queues, mended. Raises Corrupt when the fix is not for this image."""
    image = codec.load("tcp-stream", data)
    entry = image.entries[0]
    q = entry.message
    if fix.cut + fix.outq_len != q.outq_len:
        raise Corrupt(f"a connection's send queue has {q.outq_len} bytes, not {fix.cut} + {fix.outq_len}")
    entry.extra = entry.extra[: q.inq_len] + entry.extra[q.inq_len + fix.cut :]
    q.outq_len = q.unsq_len = fix.outq_len
    for field in _WINDOWS:
        if (value := getattr(fix, field)) is not None:
            setattr(q, field, value)
    return codec.dump(image)


def bound(codec: ImageCodec, read: Callable[[str], bytes]) -> list[Bound]:
    """The sockets of one dump that wait at an address of their own: TCP listeners, and UDP. For the translation."""
    found = []
    for s in _inet_sockets(codec, read):
        where = _address(s.family, s.src_addr)
        if s.proto == _IPPROTO_TCP and s.state == State.LISTEN:
            found.append(Bound("tcp", where, s.src_port))
        elif s.proto == _IPPROTO_UDP and s.src_port:
            found.append(Bound("udp", where, s.src_port))
    return [b for b in found if not b.address.is_unspecified]


def _inet_sockets(codec: ImageCodec, read: Callable[[str], bytes]) -> Iterator[Any]:
    return (e.isk for e in codec.load("files.img", read("files.img")).messages if e.HasField("isk"))


def _address(family: int, words: Sequence[int]) -> IpAddress:
    data = b"".join(word.to_bytes(4, "little") for word in words)
    try:
        return address(data[:4] if family == _AF_INET else data)
    except ValueError:
        raise Corrupt(f"files.img: a socket's address has {len(data)} bytes") from None
