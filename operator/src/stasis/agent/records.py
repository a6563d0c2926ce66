"""The decision records of one machine: a folder of files that are written once.

The same compare-and-swap that TrainJobCheckpoint.status gives in a cluster: the first writer of a key wins, every
writer and reader sees the winner's record, and it is on disk before anyone acts on it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import quote

from stasis.agent import durable
from stasis.core.records import Record
from stasis.errors import StasisError


class Records:
    """The records in `path`, which is made where it is not there; safe for many processes at once."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def create(self, key: str, record: Record) -> Record:
        """Write a record and return the one that is there afterwards, whoever wrote it.

        StasisError: it may be there all the same.
        """
        data = json.dumps(record.to_dict(), sort_keys=True).encode()
        return _parse(key, durable.create(self._folder, file_name(key), data))

    def read(self, key: str) -> Record | None:
        """Raises StasisError where the record is broken."""
        data = durable.read(self._folder, file_name(key))
        return None if data is None else _parse(key, data)

    def forget(self, op: str) -> None:
        """Delete an operation's records: nobody will ever ask for them again."""
        start = quote(f"{op}/", safe="")
        durable.remove(self._folder, *(name for name in os.listdir(self._folder) if name.startswith(start)))

    def close(self) -> None:
        os.close(self._folder)


def file_name(key: str) -> str:
    """The file of a record: any key is one name, without folders."""
    return quote(key, safe="") + ".json"


def _parse(key: str, data: bytes) -> Record:
    try:
        return Record.from_dict(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise StasisError(f"record {key} is broken: {broken}") from broken
