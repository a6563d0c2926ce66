"""Read an area of a frozen container as a tar stream: the same bytes again where nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType

from stasis.agent.files.areas import UPPER, Area, area_root, areas
from stasis.agent.files.member import END, PAGE, Member, encode, padding
from stasis.agent.files.walk import Note, Walk
from stasis.errors import CheckpointFailed

__all__ = ["Area", "Capture", "Note", "areas", "capture"]

READ = 1 << 20


class Capture:
    """One reading of an area, to be iterated once: blocks of the tar stream, of 1 MiB but for the last. A block is a
    view of one buffer, released when the next one is asked for: copy what is to last.

    The area must be frozen, or only other containers may write to it: a file that shrinks meanwhile is filled with
    zeros, one that goes is left out, both noted. Sockets are not files to carry (CRIU makes them again) and devices are
    never opened or made: noted too. OSError comes as CheckpointFailed with the path. `notes` and the counts are
    complete at the end.
    """

    def __init__(self, area: Area, links: Mapping[str, str]) -> None:
        self.area = area
        self._links = links
        self.notes: list[Note] = []
        self.members = 0
        self.data = 0  # bytes of files' content, which is what the new container must have room for
        self._position = 0
        self._fill = 0
        self._block = memoryview(bytearray(READ))

    def __iter__(self) -> Iterator[memoryview]:
        here = ""
        try:
            with ExitStack() as stack:
                source = stack.enter_context(self.area.source())
                layer = self.area.name == UPPER
                merged = stack.enter_context(area_root(self.area.pid1, UPPER)) if layer else None
                walk = Walk(self.area, source, merged, self._links)
                self.notes = walk.notes
                for member, fd in walk.members():
                    here = member.path
                    self.members += 1
                    yield from self._put(encode(member, self._position))
                    if member.stored:
                        yield from self._content(member, fd)
        except (OSError, ValueError) as error:
            where = f"{self.area.point.rstrip('/')}/{here}"
            raise CheckpointFailed(f"files of {self.area.name} cannot be read at {where}: {error}") from error
        end = -(self._position + len(END)) % PAGE
        yield from self._put(END + bytes(end))
        yield from self._handed()

    def _put(self, data: bytes) -> Iterator[memoryview]:
        view = memoryview(data)
        while view:
            piece = view[: READ - self._fill]
            self._block[self._fill : self._fill + len(piece)] = piece
            yield from self._filled(len(piece))
            view = view[len(piece) :]

    def _filled(self, count: int) -> Iterator[memoryview]:
        self._fill += count
        self._position += count
        if self._fill == READ:
            yield from self._handed()

    def _handed(self) -> Iterator[memoryview]:
        """Hand the buffer out; who keeps the view beyond its time meets an error, not other bytes."""
        view = self._block[: self._fill]
        if view:
            yield view
        view.release()
        self._fill = 0

    def _content(self, member: Member, fd: int) -> Iterator[memoryview]:
        short = False
        for start, length in member.data:
            at, end = start, start + length
            while at < end:
                target = self._block[self._fill : self._fill + min(end - at, READ - self._fill)]
                count = 0 if short else os.preadv(fd, [target], at)
                if not count:
                    short = True
                    count = len(target)
                    target[:] = bytes(count)
                at += count
                yield from self._filled(count)
        if short:
            self.notes.append(Note(member.path, "shrank while it was read; its end is filled with zeros"))
        self.data += member.stored
        yield from self._put(bytes(padding(member.stored)))


def capture(area: Area, links: Mapping[str, str] = MappingProxyType({})) -> Capture:
    """The area's files as a tar stream (PAX, OCI layer convention), read when the blocks are asked for: the tree must
    still be frozen then. `links` (see remaps.py) are hard links to add, by path in the container; of other areas' too.
    """
    points, base = area.points, area.point.rstrip("/") + "/"
    inside = {path.removeprefix(base): held for path, held in links.items() if path.startswith(base)}
    return Capture(area, {path: held for path, held in inside.items() if not points.covers(path)})
