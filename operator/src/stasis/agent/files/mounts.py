"""The mounts of a container, as /proc/PID/mountinfo shows them."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. `root` is the folder of the file system that is mounted at `point`."""

    id: int
    root: str
    point: str
    options: frozenset[str]
    kind: str
    super_options: tuple[str, ...]

    @property
    def writable(self) -> bool:
        return "rw" in self.options and "ro" not in self.super_options

    def option(self, name: str) -> str | None:
        """The value of `name=value` among the file system's options."""
        return next((o.removeprefix(f"{name}=") for o in self.super_options if o.startswith(f"{name}=")), None)


def mounts(pid: int) -> list[Mount]:
    """Mounts of the process's namespace, those on top of others last. ProcessLookupError: the process is gone."""
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            return [_parse(line) for line in lines]
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"no process {pid}") from gone


def mount_id(fd: int) -> int:
    """The id of the mount that a descriptor was opened on."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


class Points:
    """The mount points below an area's root, as paths of the area. What is at or under one is the mount's, and a folder
    above one must stay: from our mount namespace the kernel would let us remove it, and detach the mount with it."""

    def __init__(self, mounts: Iterable[Mount], base: str) -> None:
        prefix = base.rstrip("/") + "/"
        self._at = frozenset(m.point.removeprefix(prefix) for m in mounts if m.point.startswith(prefix)) - {""}
        self._above = frozenset(folder for point in self._at for folder in _ancestors(point))

    def covers(self, path: str) -> bool:
        return bool(self._at) and (path in self._at or any(folder in self._at for folder in _ancestors(path)))

    def above(self, path: str) -> bool:
        """Whether a mount lies somewhere below this folder."""
        return path in self._above


def _ancestors(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _parse(line: str) -> Mount:
    fields, _, rest = line.rstrip("\n").partition(" - ")
    mount, _, _, root, point, options = fields.split(" ")[:6]
    kind, _, super_options = rest.split(" ")
    return Mount(
        int(mount),
        _plain(root),
        _plain(point),
        frozenset(options.split(",")),
        kind,
        tuple(_plain(option) for option in super_options.split(",")),
    )


def _plain(text: str) -> str:
    """The kernel writes blanks, commas and backslashes as three octal digits."""
    if "\\" not in text:
        return text
    raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), os.fsencode(text))
    return os.fsdecode(raw)
