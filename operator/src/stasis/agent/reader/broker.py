"""What a reader cannot get at itself and asks its agent for: blobs of a folder, credentials of a registry.

The agent hands out nothing but descriptors of files that lie in the folder under the digest asked for, and the
credentials of the one repository. This end runs in the agent, in a thread; `Agent` is the reader's end.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stasis.agent.reader import wire
from stasis.errors import NotFound, StasisError
from stasis.store.credentials import Credentials, find_credentials
from stasis.store.layout import LayoutRepository
from stasis.store.reference import Reference

KEPT = 64  # descriptors of blobs, by the reader


class Broker:
    """Answers one reader at the other end of `end` until that is closed."""

    def __init__(self, reference: Reference, end: socket.socket) -> None:
        self._reference = reference
        self._folder = LayoutRepository(reference.path) if reference.path is not None else None
        self._end = end
        threading.Thread(target=self._serve, name="reader:broker", daemon=True).start()

    def _serve(self) -> None:
        with self._end:
            try:
                while True:
                    asked, _ = wire.receive(self._end, wire.MAX_REQUEST)
                    self._answer(asked)
            except (EOFError, OSError, wire.Nonsense):
                return  # the reader is gone, or will be: its calls fail

    def _answer(self, asked: dict[str, Any]) -> None:
        try:
            if self._folder is None:
                found = find_credentials(self._reference.host, self._reference.name)
                wire.send(self._end, {"credentials": asdict(found) if found else None})
                return
            fd = self._folder.open_blob(str(asked.get("blob")))
        except StasisError as error:
            wire.send(self._end, wire.told(error))
            return
        try:
            wire.send(self._end, {}, [fd])
        finally:
            os.close(fd)


class Agent:
    """The agent, asked by its reader. Errors are those of the repository."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def blob(self, digest: str) -> int:
        """A descriptor to read it from."""
        return self._ask({"blob": digest}, 1)[1][0]

    def credentials(self) -> Credentials | None:
        found, _ = self._ask({}, 0)
        return Credentials(**found["credentials"]) if found["credentials"] else None

    def _ask(self, question: dict[str, Any], fds: int) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            wire.send(self._end, question)
            answer, found = wire.receive(self._end, wire.MAX_REQUEST, fds=fds)
        if "error" in answer:
            raise wire.revived(answer["error"])
        return answer, found


class HandedFolder(LayoutRepository):
    """An OCI layout folder whose blobs the agent opens: read only, and by digest only."""

    def __init__(self, path: Path, agent: Agent) -> None:
        super().__init__(path)
        self._agent = agent
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._keeping = threading.Lock()

    def stat(self, digest: str) -> int | None:
        try:
            fd = self.open_blob(digest)
        except NotFound:
            return None
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def open_blob(self, digest: str) -> int:
        with self._keeping:
            if digest not in self._kept:
                self._kept[digest] = self._agent.blob(digest)
                if len(self._kept) > KEPT:
                    os.close(self._kept.popitem(last=False)[1])
            self._kept.move_to_end(digest)
            return os.dup(self._kept[digest])
