"""Lay an area's files into the live mounts of a fresh container, and remove again what was laid.

Where an area is an upper layer, its whiteouts delete in the merged view and its opaque folders replace. What lies at or
under a mount point of the new container is that mount's: skipped and counted. In emptyDirs and /dev/shm, what the new
container has already and the archive does not name stays (a sidecar that started afresh may have put it there).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import BinaryIO

from stasis.agent.files.archive import Archive
from stasis.agent.files.areas import UPPER, point_of
from stasis.agent.files.attributes import Attributes, apply
from stasis.agent.files.laid import CHANGED, GONE, MADE, Entry, LaidList
from stasis.agent.files.member import Kind, Member
from stasis.agent.files.target import Target
from stasis.errors import Corrupt, ResourceShort, RestoreFailed, StasisError

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass
class Stats:
    """`data` is in bytes as stored; `skipped` names lay at or under a mount point of the new container."""

    members: int = 0
    data: int = 0
    skipped: int = 0
    deleted: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Removed:
    """`removed` names are gone again. `missing` (area, path) were the fresh container's own, deleted or replaced, and
    cannot come back: the same checkpoint may be laid once more, but the container is not fit for a fresh start."""

    removed: int
    missing: tuple[tuple[str, str], ...]


def lay(
    pid1: int, area: str, stream: BinaryIO, record: LaidList, *, opened: Callable[[], None] = lambda: None
) -> Stats:
    """Read a tar stream of `capture` to its end and make its files in the container whose PID 1 is `pid1`. `opened` is
    called when the container has been reached, and nothing of the stream read.

    Corrupt: the archive is not such a stream, or leads out; what came before the bad member has been laid.
    ResourceShort: the file system is full. RestoreFailed: anything else, with the path. What was done is in `record`
    in each case.
    """
    with Target.open(pid1, area, record) as target:
        opened()
        return _Laying(area, target).run(Archive(stream, area, overlay=area == UPPER))


def remove(pid1: int, record: LaidList) -> Removed:
    """Undo what the list names, newest first: files and folders that were made go, folders that were there get their
    attributes back. The list keeps what cannot be undone. Can be repeated when it was cut short. Of a container that is
    gone nothing is left to remove."""
    if not os.path.exists(f"/proc/{pid1}/root/."):
        return Removed(0, ())
    entries = record.entries()
    removed = 0
    for area in dict.fromkeys(entry.area for entry in entries):
        with Target.open(pid1, area) as target:
            for entry in reversed(entries):
                if entry.area == area:
                    removed += _undo(target, entry)
    gone = _not_ours(entries)
    record.keep(gone)
    return Removed(removed, tuple((entry.area, entry.path) for entry in gone))


def _not_ours(entries: Sequence[Entry]) -> list[Entry]:
    """What was removed and had not been made by us."""
    made: set[tuple[str, str]] = set()
    gone: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        name = (entry.area, entry.path)
        if entry.done == MADE:
            made.add(name)
        elif entry.done == GONE and name not in made:
            gone[name] = entry
    return list(gone.values())


def _undo(target: Target, entry: Entry) -> int:
    if target.points.covers(entry.path):
        return 0
    if entry.done == MADE:
        return target.remove(entry.path)
    if entry.done == CHANGED and entry.was:
        try:
            target.finish(entry.path, entry.was)
        except FileNotFoundError:  # removed by a later member
            pass
    return 0


class _Laying:
    def __init__(self, area: str, target: Target) -> None:
        self._area = area
        self._target = target
        self._stats = Stats()
        self._open: list[tuple[str, Attributes]] = []  # folders that are still being laid into

    def run(self, archive: Archive) -> Stats:
        for member in archive.members():
            try:
                self._leave(member.path)
                self._member(member, archive)
            except OSError as error:
                raise self._failure(member, error) from error
        try:
            self._leave(None)
        except OSError as error:
            raise RestoreFailed(f"files of {self._area} cannot be laid: {error}") from error
        return self._stats

    def _member(self, member: Member, archive: Archive) -> None:
        path = member.path
        self._stats.members += 1
        if self._target.points.covers(path):
            self._stats.skipped += 1
            return
        if member.kind is Kind.FOLDER:
            self._target.folder(path)
            self._open.append((path, member.attributes))
        elif member.kind is Kind.OPAQUE:
            self._target.empty(path)
        elif member.kind is Kind.DELETED:
            self._stats.deleted += self._target.clear(path)
        else:
            self._file(member, archive)

    def _file(self, member: Member, archive: Archive) -> None:
        """Anything that is no folder."""
        path, target = member.path, self._target
        if target.points.above(path):
            raise RestoreFailed(
                f"files of {self._area}: {path} was no folder in the checkpoint, and the new container has a volume "
                f"mounted below it"
            )
        target.clear(path)
        if member.kind is Kind.SYMLINK:
            target.symlink(path, member.target, member.attributes)
        elif member.kind is Kind.FIFO:
            target.fifo(path, member.attributes)
        elif member.kind is Kind.LINK:
            if target.points.covers(member.target):
                raise RestoreFailed(
                    f"files of {self._area}: {path} is a hard link to {member.target}, which lies on a volume of the "
                    f"new container"
                )
            target.link(path, member.target)
        else:
            with target.file(path) as fd:
                for offset, piece in archive.data(member):
                    _write(fd, piece, offset)
                    self._stats.data += len(piece)
                if os.fstat(fd).st_size != member.size:
                    os.ftruncate(fd, member.size)
                apply(fd, member.attributes)

    def _leave(self, path: str | None) -> None:
        """Finish the folders that `path` does not lie in; None: all."""
        while self._open:
            folder, attributes = self._open[-1]
            if path is not None and (not folder or path == folder or path.startswith(f"{folder}/")):
                return
            self._target.finish(folder, attributes)
            self._open.pop()

    def _failure(self, member: Member, error: OSError) -> StasisError:
        where = f"files of {self._area}: member {member.path[:200]!r}"
        if error.errno in FULL:
            total = self._target.room().total
            return ResourceShort(
                f"{where}: {point_of(self._area)} of the new container is full ({total >> 20} MiB)",
                remedy="give the new container as much room there as the old one had",
            )
        if error.errno in NO_FOLDER:
            return Corrupt(f"{where}: it or what it refers to lies in no folder of the archive ({error.strerror})")
        return RestoreFailed(f"{where} cannot be laid: {error}")


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
