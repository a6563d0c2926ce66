"""An area of a live container to write into: every deed below a held root, on one mount, recorded before it is done."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from stasis.agent.files.areas import Room, area_root, point_of, room_at
from stasis.agent.files.attributes import Attributes, apply
from stasis.agent.files.beneath import child, link_of, openat2, opened, parent
from stasis.agent.files.laid import CHANGED, GONE, MADE, LaidList
from stasis.agent.files.mounts import Points, mounts

ENTRY = os.O_PATH | os.O_NOFOLLOW
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class Target:
    """The paths of its methods are relative to the area's root. What is at or under a mount point is the mount's: the
    caller asks `points` first. OSError as the system calls give it."""

    def __init__(self, root: int, points: Points, area: str, record: LaidList | None) -> None:
        self.points = points
        self._root = root
        self._area = area
        self._record = record
        self._folder: tuple[str, int] = ("", os.dup(root))  # the last parent folder, open

    @classmethod
    @contextmanager
    def open(cls, pid1: int, area: str, record: LaidList | None = None) -> Iterator[Target]:
        with area_root(pid1, area) as root:
            target = cls(root, Points(mounts(pid1), point_of(area)), area, record)
            try:
                yield target
            finally:
                os.close(target._folder[1])

    def room(self) -> Room:
        return room_at(self._root)

    def status(self, path: str) -> os.stat_result | None:
        """Of what is at a path itself, symlink or not; None: nothing. Its folder must be there."""
        folder, name = self._parent(path)
        try:
            with opened(folder, name, ENTRY) as fd:
                return os.fstat(fd)
        except FileNotFoundError:
            return None

    def folder(self, path: str) -> None:
        """Make sure that a folder is at `path`; its attributes come last, with `finish`."""
        found = self.status(path)
        if found and stat.S_ISDIR(found.st_mode):
            with opened(self._root, path, FOLDER) as fd:
                self._note(CHANGED, path, Attributes.of(fd))
            return
        self.clear(path)
        self._note(MADE, path)
        folder, name = self._parent(path)
        os.mkdir(name, 0o700, dir_fd=folder)

    def finish(self, path: str, attributes: Attributes) -> None:
        """Set a folder's attributes, when nothing more is laid into it."""
        with opened(self._root, path, FOLDER) as fd:
            apply(fd, attributes)

    @contextmanager
    def file(self, path: str) -> Iterator[int]:
        """A new empty file at a path that is clear, open for writing."""
        self._note(MADE, path)
        folder, name = self._parent(path)
        with opened(folder, name, NEW, 0o600) as fd:
            yield fd

    def symlink(self, path: str, text: str, attributes: Attributes) -> None:
        self._note(MADE, path)
        folder, name = self._parent(path)
        os.symlink(text, name, dir_fd=folder)
        self._set(path, attributes)

    def fifo(self, path: str, attributes: Attributes) -> None:
        self._note(MADE, path)
        folder, name = self._parent(path)
        os.mkfifo(name, 0o600, dir_fd=folder)
        self._set(path, attributes)

    def link(self, path: str, first: str) -> None:
        """Another name of a file of this area."""
        with opened(self._root, first, ENTRY) as fd:
            self._note(MADE, path)
            folder, name = self._parent(path)
            os.link(link_of(fd), name, dst_dir_fd=folder, follow_symlinks=True)

    def clear(self, path: str) -> bool:
        """Remove what is at a path, a folder with all in it. Returns whether there was something."""
        found = self.status(path)
        if found is None:
            return False
        self._note(GONE, path)
        if stat.S_ISDIR(found.st_mode):
            self._wipe(path)
        else:
            folder, name = self._parent(path)
            os.unlink(name, dir_fd=folder)
        return True

    def empty(self, path: str) -> None:
        """Remove what is in a folder, but for mount points and the folders that lead to them."""
        with opened(self._root, path, FOLDER) as fd:
            names = os.listdir(fd)
        for name in names:
            entry = child(path, name)
            if not self.points.covers(entry):
                self.clear(entry)

    def remove(self, path: str) -> bool:
        """Undo: remove what is at a path without a word in the list. Returns whether it was there."""
        record, self._record = self._record, None
        try:
            return self.clear(path)
        except (FileNotFoundError, NotADirectoryError):  # its folder is gone
            return False
        finally:
            self._record = record

    def _wipe(self, top: str) -> None:
        folders = [top]
        for path in folders:  # grows
            with opened(self._root, path, FOLDER) as fd:
                with os.scandir(fd) as scan:
                    entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
                for name, is_folder in entries:
                    below = child(path, name)
                    if self.points.covers(below):
                        continue
                    if is_folder:
                        folders.append(below)
                    else:
                        os.unlink(name, dir_fd=fd)
        for path in reversed(folders):
            if not self.points.above(path):
                folder, name = self._parent(path)
                os.rmdir(name, dir_fd=folder)

    def _set(self, path: str, attributes: Attributes) -> None:
        folder, name = self._parent(path)
        with opened(folder, name, ENTRY) as fd:
            apply(fd, attributes)

    def _note(self, done: str, path: str, was: Attributes | None = None) -> None:
        if self._record:
            self._record.add(done, self._area, path, was)

    def _parent(self, path: str) -> tuple[int, str]:
        """The folder that a path lies in, open, and the path's last name."""
        folder, name = parent(path)
        if folder != self._folder[0]:
            fd = openat2(self._root, folder, os.O_PATH | os.O_DIRECTORY)
            os.close(self._folder[1])
            self._folder = (folder, fd)
        return self._folder[1], name
