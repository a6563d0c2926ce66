"""The members of an area, folders before what is in them, names in order, whatever a tenant planted there."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from stasis.agent.files.areas import Area
from stasis.agent.files.attributes import Attributes
from stasis.agent.files.beneath import CHANGED, child, openat2, opened, reopen
from stasis.agent.files.member import WHITEOUT, Kind, Member
from stasis.agent.files.overlay import Marks
from stasis.agent.files.sparse import extents

ENTRY = os.O_PATH | os.O_NOFOLLOW
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOATIME
KINDS = {stat.S_IFREG: Kind.FILE, stat.S_IFLNK: Kind.SYMLINK, stat.S_IFIFO: Kind.FIFO}
NO_FD = -1


@dataclass(frozen=True)
class Note:
    """A name of the area that is not in the stream as it was, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class _View:
    """A root to read below; with `marks` it is an upper layer, else files as they are seen."""

    root: int
    marks: Marks | None


class Walk:
    """One walk. Only a few descriptors are open at a time however deep it goes, since each folder is opened anew below
    the root. `merged` is the container's root, where the source is its upper layer. `links` are more names to give,
    each to the file that a path of the host's /proc holds; their members come last."""

    def __init__(self, area: Area, source: int, merged: int | None, links: Mapping[str, str]) -> None:
        self.notes: list[Note] = []
        marks = Marks(area.user_xattrs) if merged is not None else None
        self._top = _View(source, marks)
        self._merged = _View(source if merged is None else merged, None)
        self._overlay = merged is not None
        self._points = area.points
        self._first: dict[tuple[int, int], str] = {}  # of inodes with several names, by device and number
        self._wanted = {path: _inode(os.stat(held)) for path, held in links.items()}
        self._found: dict[tuple[int, int], str] = {}  # of these inodes: a name that was met

    def members(self) -> Iterator[tuple[Member, int]]:
        """Each member, and a descriptor to read its data from where it has any (else -1), open until the next."""
        pending = [("", self._top)]
        while pending:
            path, view = pending.pop()
            fd = self._open(view.root, path, FOLDER, path)
            if fd is None:
                continue
            below: list[str] = []
            try:
                attributes = Attributes.of(fd)
                yield self._named(path, Kind.FOLDER, _own(attributes, view)), NO_FD
                marks, marked = view.marks, attributes.xattrs
                if marks and path and marks.redirected(marked):
                    # The image has its content under another name: take all of it from where the container sees it.
                    yield Member(path, Kind.OPAQUE), NO_FD
                    view = self._merged
                    with opened(view.root, path, FOLDER) as merged:
                        yield from self._entries(merged, path, view, {}, below)
                else:
                    if marks and path and marks.opaque(marked):
                        yield Member(path, Kind.OPAQUE), NO_FD
                    yield from self._entries(fd, path, view, marked, below)
            finally:
                os.close(fd)
            pending += ((name, view) for name in reversed(below))
        for path, inode in sorted(self._wanted.items()):
            first = self._found.get(inode)
            if first is None:
                raise FileNotFoundError(f"no name of the file that CRIU links as {path} is left here")
            if first != path:
                yield Member(path, Kind.LINK, target=first), NO_FD

    def _entries(
        self, folder: int, path: str, view: _View, marked: Mapping[str, bytes], below: list[str]
    ) -> Iterator[tuple[Member, int]]:
        """What is in a folder, but for its folders, whose paths are added to `below`."""
        for name in sorted(os.listdir(folder)):
            entry = child(path, name)
            if self._points.covers(entry):
                continue
            fd = self._open(folder, name, ENTRY, entry)
            if fd is None:
                continue
            try:
                if stat.S_ISDIR(os.fstat(fd).st_mode):
                    below.append(entry)
                else:
                    yield from self._entry(fd, entry, view, marked)
            finally:
                os.close(fd)

    def _entry(self, fd: int, path: str, view: _View, marked: Mapping[str, bytes]) -> Iterator[tuple[Member, int]]:
        status, attributes = os.fstat(fd), Attributes.of(fd)
        if view.marks and view.marks.whiteout(status, attributes.xattrs, marked):
            yield Member(path, Kind.DELETED), NO_FD
            return
        kind = KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            self.notes.append(Note(path, "a socket" if stat.S_ISSOCK(status.st_mode) else "a device"))
            return
        member = self._named(path, kind, _own(attributes, view))
        if self._wanted:
            self._found.setdefault(self._seen_inode(status, path), path)
        if status.st_nlink > 1:
            first = self._first.setdefault(_inode(status), path)
            if first != path:
                bare = replace(member.attributes, xattrs={})
                yield replace(member, kind=Kind.LINK, attributes=bare, target=first), NO_FD
                return
        if kind is Kind.SYMLINK:
            yield replace(member, target=os.readlink("", dir_fd=fd)), NO_FD
        elif kind is Kind.FIFO:
            yield member, NO_FD
        elif view.marks and view.marks.data_below(attributes.xattrs):
            with opened(self._merged.root, path, ENTRY) as merged:
                yield from _file(member, merged)
        else:
            yield from _file(member, fd)

    def _seen_inode(self, status: os.stat_result, path: str) -> tuple[int, int]:
        """Device and number as the container sees them."""
        if not self._overlay:
            return _inode(status)
        with opened(self._merged.root, path, ENTRY) as fd:
            return _inode(os.fstat(fd))

    def _named(self, path: str, kind: Kind, attributes: Attributes) -> Member:
        literal = self._overlay and path.rpartition("/")[2].startswith(WHITEOUT)
        return Member(path, kind, attributes, literal=literal)

    def _open(self, root: int, name: str, flags: int, path: str) -> int | None:
        try:
            return openat2(root, name, flags)
        except OSError as error:
            if error.errno not in CHANGED:
                raise
            self.notes.append(Note(path, "changed while it was read; left out"))
            return None


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _file(member: Member, entry: int) -> Iterator[tuple[Member, int]]:
    fd = reopen(entry, os.O_RDONLY | os.O_NOATIME)
    try:
        status = os.fstat(fd)
        yield replace(member, size=status.st_size, extents=extents(fd, status)), fd
    finally:
        os.close(fd)


def _own(attributes: Attributes, view: _View) -> Attributes:
    return replace(attributes, xattrs=view.marks.own(attributes.xattrs)) if view.marks else attributes
