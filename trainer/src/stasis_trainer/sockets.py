"""Which sockets this process has; the copies of ours that forked children get are closed there.

A copy would keep a connection open after its group was torn down.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

FAMILIES = ("tcp", "tcp6", "udp", "udp6")
_ours: set[str] = set()


def _inodes() -> dict[str, list[int]]:
    """Descriptors of this process by the socket's inode."""
    found: dict[str, list[int]] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.setdefault(target[8:-1], []).append(int(name))
    return found


def listing() -> list[str]:
    """Internet sockets: family, local and remote address as in /proc/net, state."""
    mine, found = _inodes(), []
    for family in FAMILIES:
        try:
            with open(f"/proc/self/net/{family}") as table:
                lines = table.read().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[9] in mine:
                found.append(f"{family} {fields[1]} {fields[2]} {fields[3]}")
    return found


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """What is opened here is ours."""
    before = set(_inodes())
    try:
        yield
    finally:
        now = set(_inodes())
        _ours.intersection_update(now)
        _ours.update(now - before)


def close_copies() -> None:
    """In a forked child. The numbers stay taken, so that nothing else gets them while torch's objects know them."""
    null = os.open(os.devnull, os.O_RDWR)
    for inode, descriptors in _inodes().items():
        if inode in _ours:
            for descriptor in descriptors:
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _ours.clear()
