"""The 512-byte header block of a tar member, as POSIX ustar has it; what does not fit goes into PAX records."""

import struct
from typing import NamedTuple

BLOCK = 512
NAME = 100  # bytes of a name or a link's target

FILE, LINK, SYMLINK, FOLDER, FIFO, PAX = b"0", b"1", b"2", b"5", b"6", b"x"

_LAYOUT = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_MAGIC = b"ustar\x0000"
_DEVICE = b"0000000\0"
_SUM = slice(148, 156)


class Header(NamedTuple):
    """Of numbers only what octal digits can hold: `size` and `mtime` below 8 ** 11, the others below 8 ** 7."""

    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    type: bytes
    target: bytes = b""


def pack(header: Header) -> bytes:
    numbers = (b"%07o\0" % n for n in (header.mode, header.uid, header.gid))
    times = (b"%011o\0" % n for n in (header.size, header.mtime))
    rest = (_MAGIC, b"", b"", _DEVICE, _DEVICE, b"")
    block = bytearray(_LAYOUT.pack(header.name, *numbers, *times, b" " * 8, header.type, header.target, *rest))
    block[_SUM] = b"%06o\0 " % sum(block)
    return bytes(block)


def unpack(block: bytes) -> Header:
    """ValueError: no such header, or its checksum is wrong."""
    name, mode, uid, gid, size, mtime, checksum, kind, target, magic, *_, prefix = _LAYOUT.unpack(block)
    if magic != _MAGIC:
        raise ValueError("no ustar header")
    if _number(checksum) != sum(block) - sum(block[_SUM]) + 8 * ord(" "):
        raise ValueError("a header with a wrong checksum")
    whole = _text(prefix) + b"/" + _text(name) if prefix[0] else _text(name)
    return Header(whole, _number(mode), _number(uid), _number(gid), _number(size), _number(mtime), kind, _text(target))


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    digits = field.strip(b" \0")
    if digits and not digits.isdigit():
        raise ValueError("a header with a malformed number")
    return int(digits or b"0", 8)
