"""The written list of what was laid into a container, from which it is removed again after a failed restore."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stasis.agent.files.attributes import Attributes


@dataclass(frozen=True)
class Entry:
    """One thing that was done at `path` of `area`: "made" a name that was not there (or whose former file has a "gone"
    entry before this one), removed one ("gone"), or changed a folder that was there, which had the attributes `was`."""

    done: str
    area: str
    path: str
    was: Attributes | None = None


MADE, GONE, CHANGED = "made", "gone", "changed"


class LaidList:
    """The list, one line of JSON an entry, written before the deed: an agent that is killed at any point leaves a list
    that names all it did, at most one entry too many. Not fsynced: a machine that goes down takes the container along.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = -1

    def add(self, done: str, area: str, path: str, was: Attributes | None = None) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        line = json.dumps([done, area, path, *([_dump(was)] if was else [])])
        os.write(self._fd, line.encode() + b"\n")

    def entries(self) -> list[Entry]:
        """All entries, oldest first; none where nothing was laid. A last line that was cut by a kill is left out."""
        try:
            lines = self.path.read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            done, area, path, *was = json.loads(line)
            found.append(Entry(done, area, path, _load(was[0]) if was else None))
        return found

    def keep(self, entries: list[Entry]) -> None:
        """Replace the list, at once."""
        self.close()
        new = LaidList(self.path.with_name(self.path.name + ".new"))
        new.path.unlink(missing_ok=True)
        new.path.touch(0o600)
        for entry in entries:
            new.add(entry.done, entry.area, entry.path, entry.was)
        new.close()
        new.path.replace(self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> LaidList:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dump(was: Attributes) -> list[Any]:
    xattrs = {name: base64.b64encode(value).decode() for name, value in was.xattrs.items()}
    return [was.mode, was.uid, was.gid, was.mtime, xattrs]


def _load(was: list[Any]) -> Attributes:
    mode, uid, gid, mtime, xattrs = was
    return Attributes(mode, uid, gid, mtime, {name: base64.b64decode(value) for name, value in xattrs.items()})
