"""Watches of files (inotify, fanotify) whose file CRIU cannot find again.

The kernel tells of a watched file its device, inode and a handle. CRIU opens the handle; where the file system cannot
(overlayfs, so everything in a container's own layers), it looks the inode up in a few folders that it knows.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stasis.agent.files.beneath import IN_ROOT, NO_MAGICLINKS, openat2
from stasis.agent.scan.mounts import Mounts
from stasis.agent.scan.observation import SOON, Observation
from stasis.agent.scan.snapshot import Descriptor, Tree

_LIBC = ctypes.CDLL(None, use_errno=True)
_MARK = re.compile(
    r"^(?:inotify|fanotify) .*?ino:(?P<inode>[0-9a-f]+) sdev:(?P<device>[0-9a-f]+) .*"
    r"fhandle-bytes:[0-9a-f]+ fhandle-type:(?P<type>[0-9a-f]+) f_handle:(?P<handle>[0-9a-f]+)$",
    re.MULTILINE,
)
_KINDS = ("anon_inode:inotify", "anon_inode:[inotify]", "anon_inode:[fanotify]")
# criu/irmap.c
_KNOWN = (
    "/etc", "/var/spool", "/var/log", "/usr/share/dbus-1/services", "/usr/share/dbus-1/system-services",
    "/var/lib/polkit-1/localauthority", "/usr/share/polkit-1/actions", "/lib/udev",
)  # fmt: skip


@dataclass(frozen=True)
class _Mark:
    device: int  # as st_dev
    inode: int
    type: int
    handle: bytes


def observe(tree: Tree) -> Iterator[Observation]:
    mounts: Mounts | None = None
    for process, descriptor in tree.descriptors():
        if descriptor.target not in _KINDS:
            continue
        mounts = mounts or Mounts.of(tree.pid1)
        for mark in _marks(descriptor):
            if not _openable(tree.pid1, mounts, mark) and not _known(tree.pid1, mark):
                yield Observation.of(
                    process,
                    f"{descriptor.where} (inode {mark.inode})",
                    "it watches a file or folder in the container's own file system, which CRIU cannot find again",
                    "watch a folder on a volume (an emptyDir, /dev/shm), or switch the watcher (auto-reload) off",
                    settles=SOON,
                )


def _marks(descriptor: Descriptor) -> Iterator[_Mark]:
    try:
        with open(f"/proc/{descriptor.pid}/fdinfo/{descriptor.fd}") as file:
            text = file.read()
    except OSError:
        return
    for found in _MARK.finditer(text):
        device = int(found["device"], 16)  # the kernel's own form: 12 bits of major, 20 of minor
        yield _Mark(
            os.makedev(device >> 20, device & 0xFFFFF),
            int(found["inode"], 16),
            int(found["type"], 16),
            bytes.fromhex(found["handle"]),
        )


def _openable(pid1: int, mounts: Mounts, mark: _Mark) -> bool:
    size = len(mark.handle)
    handle = ctypes.create_string_buffer(
        size.to_bytes(4, "little") + mark.type.to_bytes(4, "little") + mark.handle, 8 + size
    )
    for mount in mounts.by_id.values():
        if mount.device == mark.device and (folder := _opened(pid1, mount.point)) >= 0:
            try:
                fd: int = _LIBC.open_by_handle_at(folder, handle, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.close(folder)
            if fd >= 0:
                os.close(fd)
                return True
    return False


def _known(pid1: int, mark: _Mark) -> bool:
    return any(_found(folder, mark) for name in _KNOWN if (folder := _opened(pid1, name)) >= 0)


def _found(folder: int, mark: _Mark) -> bool:
    """Whether the inode is at or below a folder; closes it. Symlinks are not followed."""
    try:
        status = os.fstat(folder)
        if (status.st_dev, status.st_ino) == (mark.device, mark.inode):
            return True
        for _, folders, files, fd in os.fwalk(".", dir_fd=folder):
            for name in (*folders, *files):
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue
                if (status.st_dev, status.st_ino) == (mark.device, mark.inode):
                    return True
        return False
    finally:
        os.close(folder)


def _opened(pid1: int, path: str) -> int:
    """A folder of the container, readable; -1: none."""
    try:
        root = os.open(f"/proc/{pid1}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return openat2(root, path, os.O_RDONLY | os.O_DIRECTORY, resolve=IN_ROOT | NO_MAGICLINKS)
    except OSError:
        return -1
    finally:
        os.close(root)
