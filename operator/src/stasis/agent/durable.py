"""Small files that survive a crash at any instant: replaced whole, or written once by the first of many writers.

`folder` is a descriptor of the folder. All raise StasisError naming the file where the file system refuses.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from stasis.errors import ResourceShort, StasisError, Unsupported


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as refused:
        if refused.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceShort(f"no room in the state folder for {name}: {refused.strerror}") from refused
        raise StasisError(f"state file {name}: {refused.strerror}") from refused


def replace(folder: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file whole: after a crash it holds the old bytes or the new ones. One writer per name at a time."""
    temporary = f".{name}.new"
    with _naming(name):
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder
        )
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


def create(folder: int, name: str, data: bytes) -> bytes:
    """Write a file once and return what is in it: `data` for the first writer, the first one's for all others.

    Compare-and-swap by link(2) of a file that had no name before, so nobody ever reads half of it and a crash leaves
    nothing behind.
    """
    with _naming(name):
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as refused:
            if refused.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            remedy = "a state folder on ext4, xfs, btrfs or tmpfs"
            raise Unsupported("the state folder's file system knows no O_TMPFILE", remedy=remedy) from refused
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
            return claim(folder, f"/proc/self/fd/{fd}", name)


def claim(folder: int, prepared: str, name: str) -> bytes:
    """As `create`, with bytes that are in the file `prepared` already: needs no room on a full disk."""
    with _naming(name):
        try:
            os.link(prepared, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            pass
    won = read(folder, name)
    if won is None:
        raise StasisError(f"state file {name} was removed while it was written")
    return won


def read(folder: int, name: str) -> bytes | None:
    """A file's bytes, None where there is none. Its name is on disk before they are believed: who acts on a record
    must not be the only one to have seen it."""
    with _naming(name):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            os.fsync(folder)
            return file.read()


def exists(folder: int, name: str) -> bool:
    """Whether there is such a file, perhaps not on disk yet."""
    return os.access(name, os.F_OK, dir_fd=folder)


def remove(folder: int, *names: str) -> None:
    """Delete files; what is not there is no error."""
    for name in names:
        with _naming(name):
            try:
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
    os.fsync(folder)
