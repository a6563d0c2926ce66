"""Reservations of a node's room, over all gangs and all agents that checkpoint there (rule: Prepare reserves).

One file for each in a folder of the node, locked (flock) by the process that holds it for as long as it lives: what a
killed agent had reserved is free again at once, and its file is swept by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from stasis.agent.room import node_room
from stasis.core.capacity import Amounts, Plan, plan
from stasis.errors import CheckpointFailed

_LOCK = "lock"
_SUFFIX = ".reservation"


class Reservation:
    """What one checkpoint of one rank may take, until it is closed."""

    def __init__(self, ledger: Ledger, path: Path, fd: int, made: Plan) -> None:
        self._ledger, self._path, self._fd = ledger, path, fd
        self.plan = made
        self._open = made.amounts

    def spent(self, amounts: Amounts) -> None:
        """So much of it is in use by now, and missing in what the system itself says is free: counted there alone."""
        with self._ledger.locked():
            self._open = self._open - amounts
            _write(self._fd, self._open)

    def close(self) -> None:
        """Give it back. A second time changes nothing."""
        if self._fd >= 0:
            with self._ledger.locked():
                self._path.unlink(missing_ok=True)
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ledger:
    """The reservations of a node. `folder`: shared by its agents, on the disk that captures and packs go to.

    `room` tells what is free, apart from reservations.
    """

    def __init__(self, folder: Path, room: Callable[[Path], Amounts] = node_room) -> None:
        self._folder = folder
        self._room = room
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def reserve(self, name: str, size: int, *, releases: bool, kept: Amounts | None = None) -> Reservation:
        """Room for a dump of about `size` bytes (see `capacity.plan`); `name` says of which rank of which gang.

        Raises ResourceShort when there is too little, CheckpointFailed when that name is reserved already.
        """
        path = self._folder / f"{quote(name, safe='')}{_SUFFIX}"
        with self.locked():
            others = self._others()
            if path in others:
                raise CheckpointFailed(f"room for {name} is reserved already: another checkpoint of it is under way")
            reserved = sum((amounts for amounts in others.values()), Amounts())
            made = plan(size, self._room(self._folder) - reserved, releases=releases, kept=kept)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, made.amounts)
        return Reservation(self, path, fd, made)

    def reserved(self) -> Amounts:
        """By all living holders together."""
        with self.locked():
            return sum((amounts for amounts in self._others().values()), Amounts())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _others(self) -> dict[Path, Amounts]:
        """What is held, by file; the files of holders that are gone are removed."""
        held = {}
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with open(path, "r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held[path] = Amounts.from_dict(json.loads(file.read()))
                else:
                    path.unlink()
        return held


def _write(fd: int, amounts: Amounts) -> None:
    data = json.dumps(amounts.as_dict()).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
