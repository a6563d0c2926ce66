"""The decision records of a cluster: in the status of the TrainJobCheckpoint that they are about."""

from __future__ import annotations

import json
from typing import Any

from lightkube import Client
from lightkube.types import PatchType

from stasis.core.records import Record, Verdict
from stasis.errors import NotFound, StasisError, Unavailable
from stasis.kube.client import Checkpoints, Conflict, meta, translated, unless_changed

_TRIES = 20  # others write to the same status: one conflict for each of their writes
_GIVING_UP = (Verdict.ABORT, Verdict.ABANDONED, Verdict.ENDED)


class ApiRecords:
    """Records of the operations of one TrainJobCheckpoint, written by compare-and-swap: the first writer of a key wins.

    Of a checkpoint that is gone for ever (deleted, or another one under its name) no record will be read again, so a
    record that gives up holds without being written: what was frozen for it must not wait.
    """

    def __init__(self, client: Client, namespace: str, name: str, uid: str = "") -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._uid = uid

    def create(self, key: str, record: Record) -> Record:
        """Write a record and return the one that is there afterwards, whoever wrote it. Raises StasisError where it
        cannot be said; it may be there all the same."""
        for _ in range(_TRIES):
            checkpoint = self._get()
            operation = _operation(checkpoint, key)
            if checkpoint is None or operation is None:
                if record.verdict in _GIVING_UP:
                    return record
                raise NotFound(f"checkpoint {self._namespace}/{self._name} has no operation for the record {key}")
            if (found := _find(operation, key)) is not None:
                return found
            operation.setdefault("records", []).append(
                {
                    "key": key,
                    "verdict": str(record.verdict),
                    "epoch": record.epoch,
                    "record": json.dumps(record.to_dict(), sort_keys=True),
                }
            )
            change = unless_changed(checkpoint, {"operations": checkpoint["status"]["operations"]})
            try:
                with translated(f"record {key}"):
                    self._client.patch(
                        Checkpoints.Status,
                        self._name,
                        change,
                        namespace=self._namespace,
                        patch_type=PatchType.MERGE,
                    )
                return record
            except (Conflict, NotFound):
                continue
        raise Unavailable(f"record {key}: others write to the same object all the time")

    def read(self, key: str) -> Record | None:
        """Raises StasisError where it cannot be read, or is broken."""
        operation = _operation(self._get(), key)
        return None if operation is None else _find(operation, key)

    def _get(self) -> dict[str, Any] | None:
        """The checkpoint; None where it is gone for ever."""
        try:
            with translated(f"checkpoint {self._namespace}/{self._name}"):
                found = self._client.get(Checkpoints, self._name, namespace=self._namespace)
        except NotFound:
            return None
        return found if not self._uid or meta(found).get("uid") == self._uid else None


def _operation(checkpoint: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    op = key.rpartition("/")[0]
    operations: list[dict[str, Any]] = ((checkpoint or {}).get("status") or {}).get("operations") or []
    return next((operation for operation in operations if operation["op"] == op), None)


def _find(operation: dict[str, Any], key: str) -> Record | None:
    return next((parse(entry) for entry in operation.get("records") or () if entry["key"] == key), None)


def parse(entry: dict[str, Any]) -> Record:
    """A record as the API has it. Raises StasisError where it is broken."""
    try:
        return Record.from_dict(json.loads(entry["record"]))
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise StasisError(f"record {entry.get('key')} is broken: {broken}") from broken
