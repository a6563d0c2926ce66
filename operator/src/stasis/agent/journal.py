"""What an agent has under way on its node, written down before it is done: all that a restarted agent goes by.

One file per frozen tree, or per whatever else its owner must be able to undo. A broken file is reported and never
hides the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from stasis.agent import durable
from stasis.agent.freezer import Version
from stasis.errors import StasisError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Fate(StrEnum):
    """What a freeze was claimed for: open until one of these is written, once and for all."""

    VOTED = "voted"  # the rank's part is complete: frozen until a decision is recorded
    FIRED = "fired"  # its guardian let it run on: no vote can be made for this freeze any more


@dataclass(frozen=True)
class FrozenTree:
    """One freeze of one rank, written before it begins. Process ids are the host's, each with its start time."""

    op: str
    rank: int
    epoch: int
    container_id: str
    pid1: int
    pid1_start: int  # clock ticks after boot
    root: int
    root_start: int
    cgroup: str  # folder of the freezer group
    freezer: Version
    deadline: int  # ns of CLOCK_BOOTTIME
    records: str  # folder of the decision records
    boot: str = field(default_factory=lambda: BOOT_ID.read_text().strip())

    @property
    def name(self) -> str:
        return f"{self.op}.{self.rank}"


@dataclass(frozen=True)
class Broken:
    """A file of the journal that cannot be read."""

    name: str
    cause: str


class StateDir:
    """An agent's folder on a node, made with mode 0700 where it is not there. All raise StasisError where the file
    system refuses."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)

    # Any owner's entries: JSON objects by kind and name.

    def write(self, kind: str, name: str, data: Mapping[str, Any]) -> None:
        """Write an entry whole and durably; one writer per entry at a time."""
        durable.replace(self.fd, _file(kind, name), json.dumps(data, sort_keys=True).encode())

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        """Raises StasisError where the entry is broken."""
        data = durable.read(self.fd, _file(kind, name))
        if data is None:
            return None
        try:
            entry = json.loads(data)
        except ValueError as broken:
            raise StasisError(f"journal entry {kind} {name} is broken: {broken}") from broken
        if not isinstance(entry, dict):
            raise StasisError(f"journal entry {kind} {name} is broken: no JSON object")
        return entry

    def names(self, kind: str) -> list[str]:
        files = (file for file in os.listdir(self.fd) if file.endswith(f".{kind}") and not file.startswith("."))
        return sorted(unquote(file.removesuffix(f".{kind}")) for file in files)

    def remove(self, kind: str, name: str) -> None:
        durable.remove(self.fd, _file(kind, name))

    # Frozen trees.

    def write_tree(self, tree: FrozenTree) -> None:
        self.write("tree", tree.name, asdict(tree))

    def read_tree(self, name: str) -> FrozenTree | Broken | None:
        try:
            data = self.read("tree", name)
            return None if data is None else FrozenTree(**data)
        except (StasisError, KeyError, TypeError, ValueError) as broken:
            return Broken(name, str(broken))

    def trees(self) -> Iterator[FrozenTree | Broken]:
        for name in self.names("tree"):
            if (tree := self.read_tree(name)) is not None:
                yield tree

    def fate(self, name: str) -> Fate | None:
        """What the tree's freeze was claimed for; None: nothing yet."""
        data = durable.read(self.fd, _file("fate", name))
        return None if data is None else Fate(data.decode())

    def claim(self, name: str, fate: Fate) -> Fate:
        """Decide the tree's fate unless it is decided; returns what it is: the agent votes or a guardian fires."""
        return Fate(durable.create(self.fd, _file("fate", name), fate.encode()).decode())

    def prepare_to_fire(self, name: str) -> None:
        """Write down what `fire` needs, so that it works on a full disk."""
        durable.replace(self.fd, _file("fire", name), Fate.FIRED.encode())

    def fire(self, name: str) -> Fate:
        """`claim` for the guardian."""
        return Fate(durable.claim(self.fd, _file("fire", name), _file("fate", name)).decode())

    def end(self, name: str) -> None:
        """Tell the tree's guardian that the freeze is over: whoever wrote this touches the tree no more."""
        durable.create(self.fd, _file("end", name), b"{}")

    def ended(self, name: str) -> bool:
        """Also where the tree was forgotten."""
        return durable.exists(self.fd, _file("end", name)) or not durable.exists(self.fd, _file("tree", name))

    def forget_tree(self, name: str) -> None:
        """Delete all of a tree's files, the entry last: what is half forgotten is found again."""
        durable.remove(self.fd, *(_file(kind, name) for kind in ("fate", "fire", "end", "guardian", "log")))
        self.remove("tree", name)

    def log(self, name: str) -> int:
        """Descriptor to append to the log of the tree's guardian."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(_file("log", name), flags, 0o600, dir_fd=self.fd)

    def log_text(self, name: str) -> str:
        return (durable.read(self.fd, _file("log", name)) or b"").decode(errors="replace")


def _file(kind: str, name: str) -> str:
    return f"{quote(name, safe='')}.{kind}"
