"""Open files of a container so that nothing in them leads out: no symlink, no `..`, no magic link, no other mount.

An absolute symlink below /proc/PID/root leads to the host, and a component may be swapped for a symlink between a check
and its use; so every path is resolved by openat2 below a descriptor that is held, and attributes are read and written
through /proc/self/fd of a descriptor, never by name again.
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, IN_ROOT = 0x01, 0x02, 0x04, 0x10
STRICT = IN_ROOT | NO_MAGICLINKS | NO_SYMLINKS | NO_XDEV
SYS_OPENAT2 = 437  # the same number on every architecture
ATTEMPTS = 100  # EAGAIN: something was renamed while the kernel resolved the path

# What is meant when a path that was listed cannot be opened in this way: it changed under our hands.
CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)

_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def openat2(folder: int, path: str, flags: int, mode: int = 0, resolve: int = STRICT) -> int:
    """A descriptor (close-on-exec) of `path` below `folder`, "" being the folder itself. OSError as open(2)'s, ELOOP
    for a symlink on the way and EXDEV for another mount. With O_PATH and O_NOFOLLOW a last symlink is opened itself."""
    how = _How(flags | os.O_CLOEXEC, mode, resolve)
    name = os.fsencode(path or ".")
    for _ in range(ATTEMPTS):
        fd: int = _libc.syscall(SYS_OPENAT2, folder, name, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)


@contextmanager
def opened(folder: int, path: str, flags: int, mode: int = 0, resolve: int = STRICT) -> Iterator[int]:
    """openat2 for the length of a with statement."""
    fd = openat2(folder, path, flags, mode, resolve)
    try:
        yield fd
    finally:
        os.close(fd)


def link_of(fd: int) -> str:
    """A path that names the very file behind a descriptor, also a symlink's or a FIFO's own inode."""
    return f"/proc/self/fd/{fd}"


def reopen(fd: int, flags: int) -> int:
    """Open the file behind an O_PATH descriptor. Only for what fstat said is a regular file or a folder."""
    return os.open(link_of(fd), flags | os.O_CLOEXEC)


def child(folder: str, name: str) -> str:
    """A path of an area (relative, "" is its root) and a name in it."""
    return f"{folder}/{name}" if folder else name


def parent(path: str) -> tuple[str, str]:
    """Folder and last name of a path of an area."""
    folder, _, name = path.rpartition("/")
    return folder, name
