"""The members of a file layer and how each is written as tar: PAX headers in the OCI layer convention.

Unchanged content gives the same bytes at the same place of a page: headers hold nothing that varies, and a comment
record of blanks puts the data of every file of a page or more on a multiple of 4096, whatever came before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from stasis.agent.files import ustar
from stasis.agent.files.attributes import Attributes
from stasis.agent.files.ustar import BLOCK, Header, pack

PAGE = 4096
MAX_PATH = 4095  # bytes; what the kernel resolves in one call
MAX_PAX = 4 << 20  # bytes of a member's PAX records, foreign or ours: a long list of extents is the largest
MAX_EXTENTS = 1 << 16
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
XATTR, LITERAL = "SCHILY.xattr.", "STASIS.literal"
SPARSE_NAME, SPARSE_SIZE, SPARSE_COUNT, SPARSE_MAP = (f"GNU.sparse.{x}" for x in ("name", "size", "numblocks", "map"))
END = bytes(2 * BLOCK)


class Kind(Enum):
    """What a member is; the value is its type in the tar header."""

    FILE = ustar.FILE
    FOLDER = ustar.FOLDER
    SYMLINK = ustar.SYMLINK
    FIFO = ustar.FIFO
    LINK = ustar.LINK  # another name of the member `target`
    DELETED = b"whiteout"  # a name of the image that the container removed
    OPAQUE = b"opaque"  # a folder whose content is only what follows, nothing of the image's


@dataclass(frozen=True)
class Member:
    """One name of an area. `path` is relative, "" is the area's root. A file has `size` bytes, of which only `extents`
    (offset, length; ascending) are stored where it is sparse. `target` is a symlink's text or a link's first name."""

    path: str
    kind: Kind
    attributes: Attributes = field(default_factory=Attributes)
    size: int = 0
    extents: tuple[tuple[int, int], ...] | None = None
    target: str = ""
    literal: bool = False  # the name begins with .wh. and yet is a file's own

    @property
    def data(self) -> tuple[tuple[int, int], ...]:
        """Offset and length of each piece of the file that is stored."""
        whole = ((0, self.size),) if self.size else ()
        return whole if self.extents is None else self.extents

    @property
    def stored(self) -> int:
        """Bytes of data that follow the header, before padding to a block."""
        return sum(length for _, length in self.data)


def encode(member: Member, position: int) -> bytes:
    """The header blocks of a member that begins at `position` (a multiple of 512) of the stream."""
    name, kind = _name(member)
    attributes = member.attributes
    records: dict[str, bytes] = {}
    header = Header(
        name=_text(records, "path", name),
        mode=attributes.mode,
        uid=_number(records, "uid", attributes.uid, 7),
        gid=_number(records, "gid", attributes.gid, 7),
        size=_number(records, "size", member.stored, 11),
        mtime=_time(records, attributes.mtime),
        type=kind.value,
        target=_text(records, "linkpath", member.target),
    )
    if member.extents is not None:
        pieces = list(member.extents)
        if not pieces or sum(pieces[-1]) != member.size:
            pieces.append((member.size, 0))  # a hole at the end
        records[SPARSE_NAME] = _bytes(name)
        records[SPARSE_SIZE] = b"%d" % member.size
        records[SPARSE_COUNT] = b"%d" % len(pieces)
        records[SPARSE_MAP] = ",".join(f"{offset},{length}" for offset, length in pieces).encode()
    for attribute, value in sorted(attributes.xattrs.items()):
        records[XATTR + attribute.replace("%", "%25").replace("=", "%3D")] = value
    if member.literal:
        records[LITERAL] = b"1"
    return _pax(records, position, aligned=header.size >= PAGE or "size" in records) + pack(header)


def padding(size: int) -> int:
    """Bytes that fill up to a whole block."""
    return -size % BLOCK


def parse_records(raw: memoryview) -> Iterator[tuple[str, bytes]]:
    """Keyword and value of each PAX record. ValueError: they are malformed."""
    data = bytes(raw)
    at = 0
    while at < len(data):
        digits, blank, _ = data[at : at + 9].partition(b" ")
        if not blank or not digits.isdigit():
            raise ValueError("a PAX record without a length")
        end = at + int(digits)
        keyword, equals, value = data[at + len(digits) + 1 : end].partition(b"=")
        if not equals or end > len(data) or data[end - 1 : end] != b"\n" or not value:
            raise ValueError("a malformed PAX record")
        yield keyword.decode("utf-8", "surrogateescape"), value[:-1]
        at = end


def _name(member: Member) -> tuple[str, Kind]:
    if member.kind is Kind.DELETED:
        folder, slash, name = member.path.rpartition("/")
        return f"{folder}{slash}{WHITEOUT}{name}", Kind.FILE
    if member.kind is Kind.OPAQUE:
        return f"{member.path}/{OPAQUE}".lstrip("/"), Kind.FILE
    if member.kind is Kind.FOLDER:
        return f"{member.path or '.'}/", Kind.FOLDER
    return member.path, member.kind


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(records: dict[str, bytes], keyword: str, text: str) -> bytes:
    """The text for the header itself, which holds 100 characters of ASCII; else a record, and a stand-in there."""
    if text.isascii() and len(text) <= ustar.NAME:
        return text.encode()
    records[keyword] = _bytes(text)
    return text.encode("ascii", "replace")[-ustar.NAME :].lstrip(b"/")


def _number(records: dict[str, bytes], keyword: str, value: int, digits: int) -> int:
    if value < 8**digits:
        return value
    records[keyword] = b"%d" % value
    return 0


def _time(records: dict[str, bytes], ns: int) -> int:
    seconds, part = divmod(abs(ns), 10**9)
    if ns >= 0 and not part and seconds < 8**11:
        return seconds
    records["mtime"] = f"{'-' if ns < 0 else ''}{seconds}.{part:09d}".encode()
    return 0


def _record(keyword: str, value: bytes) -> bytes:
    body = b" " + _bytes(keyword) + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    length = len(body) + len(str(length))
    return str(length).encode() + body


def _pax(records: dict[str, bytes], position: int, *, aligned: bool) -> bytes:
    """The extended header of these records, lengthened so that the data begins on a page where it is to be aligned."""
    data = b"".join(_record(keyword, value) for keyword, value in records.items())
    if any(not _is_utf8(records[keyword]) for keyword in ("path", "linkpath") if keyword in records):
        data = _record("hdrcharset", b"BINARY") + data
    if aligned:
        if not data and (position + BLOCK) % PAGE == 0:
            return b""
        room = -(position + 2 * BLOCK) % PAGE
        while room < len(data) or not room:
            room += PAGE
        if (spare := room - len(data)) >= BLOCK:
            data += _comment(spare)
    if not data:
        return b""
    if len(data) > MAX_PAX:
        raise ValueError(f"its name, extents and attributes take {len(data)} bytes")
    header = Header(b"././@PaxHeader", 0o644, 0, 0, len(data), 0, ustar.PAX)
    return pack(header) + data + bytes(padding(len(data)))


def _comment(length: int) -> bytes:
    """A comment record of exactly so many bytes."""
    start = f"{length} comment=".encode()
    return start + b" " * (length - len(start) - 1) + b"\n"


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
