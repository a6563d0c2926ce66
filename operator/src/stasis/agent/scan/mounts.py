"""The mounts of a container, as an open file's `mnt_id` refers to them."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass

from stasis.agent import proctree

_LIBC = ctypes.CDLL(None, use_errno=True)
_MQUEUE_MAGIC = 0x19800202
_STATFS_SIZE = 256  # more than any architecture's struct statfs, which begins with the long f_type


@dataclass(frozen=True)
class Mount:
    number: int
    parent: int
    device: int  # as st_dev
    point: str
    kind: str


@dataclass(frozen=True)
class Mounts:
    by_id: dict[int, Mount]

    @classmethod
    def of(cls, pid: int) -> Mounts:
        found = {}
        for line in proctree.read(pid, pid, "mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            number, parent, device, _, point, *_ = before.split()
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)
            found[int(number)] = Mount(int(number), int(parent), _device(device), point, after.split()[0])
        return cls(found)

    def hidden(self, mount: Mount) -> bool:
        """Something was mounted over it later: on its own root, or on a folder that leads to it."""
        if any(other.parent == mount.number and other.point == mount.point for other in self.by_id.values()):
            return True
        while above := self.by_id.get(mount.parent):
            for other in self.by_id.values():
                beside = other.parent == above.number and other.number not in (mount.number, above.number)
                if beside and f"{mount.point}/".startswith(f"{other.point.rstrip('/')}/"):
                    return True
            if above.number == mount.number:
                return False
            mount = above
        return False

    @staticmethod
    def is_message_queue(path: str) -> bool:
        buffer = ctypes.create_string_buffer(_STATFS_SIZE)
        if _LIBC.statfs(path.encode(), buffer):
            return False
        kind: int = ctypes.c_long.from_buffer(buffer).value
        return kind == _MQUEUE_MAGIC


def _device(text: str) -> int:
    major, _, minor = text.partition(":")
    return os.makedev(int(major), int(minor))
