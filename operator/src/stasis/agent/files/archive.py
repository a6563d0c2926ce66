"""Read a file layer's tar strictly: it is foreign bytes, and what it names will be written with our privileges.

Bounded memory whatever a header claims; anything that capture.py would not write is refused by the member's name.
"""

import os
from collections.abc import Iterator
from typing import BinaryIO

from stasis.agent.files import ustar
from stasis.agent.files.attributes import CARRIED, Attributes
from stasis.agent.files.member import (
    LITERAL,
    MAX_EXTENTS,
    MAX_PATH,
    MAX_PAX,
    OPAQUE,
    SPARSE_COUNT,
    SPARSE_MAP,
    SPARSE_NAME,
    SPARSE_SIZE,
    WHITEOUT,
    XATTR,
    Kind,
    Member,
    padding,
    parse_records,
)
from stasis.agent.files.ustar import BLOCK, Header
from stasis.errors import Corrupt

READ = 1 << 20
MAX_NAME = 255
MAX_ID = 2**32 - 2  # 2**32 - 1 means 'unchanged' to chown
MAX_SIZE = 2**63 - 1
PLAIN = {"path", "linkpath", "size", "uid", "gid", "mtime", "comment", "hdrcharset", LITERAL}
SPARSE = {SPARSE_NAME, SPARSE_SIZE, SPARSE_COUNT, SPARSE_MAP}


class Archive:
    """The members of one area's tar stream. With `overlay` the whiteout names of OCI layers have their meaning."""

    def __init__(self, stream: BinaryIO, area: str, *, overlay: bool) -> None:
        self._stream = stream
        self._area = area
        self._overlay = overlay
        self._buffer = memoryview(bytearray(READ))
        self._ready = self._buffer[:0]
        self._left = 0  # bytes of the current member that were not taken, with its padding
        self._path = ""

    def members(self) -> Iterator[Member]:
        """Each member, in order. Its data is taken with `data` before the next one, or passed over. Corrupt."""
        while True:
            self._pass_over()
            block = self._take(BLOCK)
            if not any(block):
                self._expect_end()
                return
            records: dict[str, bytes] = {}
            header = self._header(block)
            if header.type == ustar.PAX:
                if header.size > MAX_PAX:
                    raise self._corrupt(f"a PAX header of {header.size} bytes")
                records = self._records(self._take(header.size + padding(header.size))[: header.size])
                header = self._header(self._take(BLOCK))
            yield self._member(header, records)

    def data(self, member: Member) -> Iterator[tuple[int, memoryview]]:
        """Offset in the file and bytes of each stored piece of the current member; a view is valid until the next."""
        for start, length in member.data:
            at, end = start, start + length
            while at < end:
                piece = self._some(end - at)
                self._left -= len(piece)
                yield at, piece
                at += len(piece)

    def _header(self, block: memoryview) -> Header:
        try:
            header = ustar.unpack(bytes(block))
        except ValueError as error:
            raise self._corrupt(f"after this: {error}") from error
        self._path = _text(header.name)
        return header

    def _records(self, raw: memoryview) -> dict[str, bytes]:
        try:
            records = list(parse_records(raw))
        except ValueError as error:
            raise self._corrupt(str(error)) from error
        found = dict(records)
        if "path" in found:
            self._path = _text(found["path"])
        if len(found) != len(records):
            raise self._corrupt("a PAX record twice")
        for keyword in found:
            if keyword not in PLAIN | SPARSE and not keyword.startswith(XATTR):
                raise self._corrupt(f"an unknown PAX record, {keyword[:100]}")
        return found

    def _member(self, header: Header, records: dict[str, bytes]) -> Member:
        name = _text(records.get("path", header.name))
        self._path = name
        try:
            kind = Kind(header.type)
        except ValueError:
            raise self._corrupt(f"of type {header.type!r}; devices and other special members are refused") from None
        size = self._number(records, "size", header.size, MAX_SIZE)
        if kind is not Kind.FILE and size:
            raise self._corrupt("data without a file")
        self._left = size + padding(size)
        path = self._checked(name, kind)
        whole, extents = self._extents(records, size) if SPARSE & records.keys() else (size, None)
        target = _text(records.get("linkpath", header.target))
        if kind is Kind.LINK:
            target = self._checked(target, kind)
        elif kind is Kind.SYMLINK and (not target or "\0" in target or len(os.fsencode(target)) > MAX_PATH):
            raise self._corrupt("a symlink without a usable target")
        attributes = Attributes(
            header.mode & 0o7777,
            self._number(records, "uid", header.uid, MAX_ID),
            self._number(records, "gid", header.gid, MAX_ID),
            self._time(records, header),
            self._xattrs(records),
        )
        member = Member(path, kind, attributes, whole, extents, target, LITERAL in records)
        return self._whiteout(member) if self._overlay and not member.literal else member

    def _whiteout(self, member: Member) -> Member:
        folder, slash, name = member.path.rpartition("/")
        if not name.startswith(WHITEOUT):
            return member
        if member.kind is not Kind.FILE or member.size:
            raise self._corrupt("a whiteout that is no empty file")
        if name == OPAQUE:
            if not folder:
                raise self._corrupt("the root may not be made empty")
            return Member(folder, Kind.OPAQUE)
        hidden = name.removeprefix(WHITEOUT)
        if hidden in ("", ".", "..") or hidden.startswith(WHITEOUT):
            raise self._corrupt("a whiteout of no file")
        return Member(f"{folder}{slash}{hidden}", Kind.DELETED)

    def _checked(self, name: str, kind: Kind) -> str:
        if kind is Kind.FOLDER:
            name = name.removesuffix("/")
            if name == ".":
                return ""
        if name.startswith("/"):
            raise self._corrupt("an absolute name")
        raw = os.fsencode(name)
        parts = raw.split(b"/")
        if len(raw) > MAX_PATH or b"\0" in raw or any(p in (b"", b".", b"..") or len(p) > MAX_NAME for p in parts):
            raise self._corrupt(f"the name {name[:200]!r} is not one below the area")
        return name

    def _number(self, records: dict[str, bytes], keyword: str, default: int, limit: int) -> int:
        value = records.get(keyword)
        if value is not None and (not value.isdigit() or len(value) > 20):
            raise self._corrupt(f"{keyword} is no number")
        number = default if value is None else int(value)
        if not 0 <= number <= limit:
            raise self._corrupt(f"{keyword} is out of range")
        return number

    def _time(self, records: dict[str, bytes], header: Header) -> int:
        """Modification time in ns."""
        text = records.get("mtime")
        if text is None:
            return header.mtime * 10**9
        whole, _, part = text.removeprefix(b"-").partition(b".")
        if not whole.isdigit() or not (part or b"0").isdigit() or len(whole) > 11 or len(part) > 9:
            raise self._corrupt("mtime is no time")
        ns = int(whole) * 10**9 + int(part.ljust(9, b"0") or b"0")
        return -ns if text.startswith(b"-") else ns

    def _xattrs(self, records: dict[str, bytes]) -> dict[str, bytes]:
        found = {}
        for keyword, value in records.items():
            if keyword.startswith(XATTR):
                name = keyword.removeprefix(XATTR).replace("%3D", "=").replace("%25", "%")
                if not name.startswith(CARRIED) or "\0" in name or len(name) > MAX_NAME:
                    raise self._corrupt(f"the extended attribute {name[:100]} is not carried")
                found[name] = value
        return found

    def _extents(self, records: dict[str, bytes], stored: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Size of a sparse file and the pieces that are stored."""
        size = self._number(records, SPARSE_SIZE, -1, MAX_SIZE)
        fields = records.get(SPARSE_MAP, b"").split(b",")
        if len(fields) % 2 or len(fields) > 2 * (MAX_EXTENTS + 1):
            raise self._corrupt("a malformed list of extents")
        if not all(f.isdigit() and len(f) <= 20 for f in fields):
            raise self._corrupt("a malformed list of extents")
        numbers = [int(f) for f in fields]
        pieces, end = [], 0
        for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
            if offset < end or offset + length > size:
                raise self._corrupt("extents that overlap or lie beyond the file's end")
            end = offset + length
            if length:
                pieces.append((offset, length))
        if sum(length for _, length in pieces) != stored:
            raise self._corrupt("extents that are not what is stored")
        return size, tuple(pieces)

    def _pass_over(self) -> None:
        while self._left:
            self._left -= len(self._some(self._left))

    def _expect_end(self) -> None:
        if any(self._take(BLOCK)):
            raise self._corrupt("one empty block, and then no end")
        while self._fill():
            if any(self._ready):
                raise self._corrupt("bytes after the end")
            self._ready = self._ready[:0]

    def _fill(self) -> bool:
        if not self._ready:
            count = self._stream.readinto(self._buffer)  # type: ignore[attr-defined]
            self._ready = self._buffer[: count or 0]
        return bool(self._ready)

    def _some(self, limit: int) -> memoryview:
        """At least one byte and at most `limit`, of what was read at once."""
        if not self._fill():
            raise self._corrupt("the archive ends early")
        piece, self._ready = self._ready[:limit], self._ready[limit:]
        return piece

    def _take(self, size: int) -> memoryview:
        """Exactly so many bytes; the caller has bounded `size`."""
        if len(self._ready) >= size:
            piece, self._ready = self._ready[:size], self._ready[size:]
            return piece
        whole = bytearray()
        while len(whole) < size:
            whole += self._some(size - len(whole))
        return memoryview(whole)

    def _corrupt(self, why: str) -> Corrupt:
        return Corrupt(f"files of {self._area}: member {self._path[:200]!r}: {why}")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
