"""The cluster's decision records as a node has them."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

from lightkube import Client

from stasis.agent.records import Records
from stasis.agent.runner import RecordsPort, RecordsStore
from stasis.api.v1alpha1.trainjobcheckpoint import ConditionType
from stasis.core.driver import Reply
from stasis.core.durability import Need
from stasis.core.frames import Home
from stasis.core.records import Record, Verdict
from stasis.errors import NotFound
from stasis.kube.client import Checkpoints, meta, translated


class Mirrored:
    """The records of one TrainJobCheckpoint. Those that this node has seen lie in its own folder too: guardians read
    them there, and what was recorded once holds when the API is down."""

    def __init__(self, api: RecordsStore, node: Records) -> None:
        self._api = api
        self._node = node

    def create(self, key: str, record: Record) -> Record:
        return self._node.create(key, self._api.create(key, record))

    def read(self, key: str) -> Record | None:
        record = self._node.read(key)
        if record is None and (record := self._api.read(key)) is not None:
            record = self._node.create(key, record)
        return record


class PooledRecords:
    """Records as a driver's port, asked in other threads: the API may take its time, and a driver has deadlines."""

    def __init__(self, store: RecordsStore, pool: Executor) -> None:
        self._port = RecordsPort(store)
        self._pool = pool

    def create(self, key: str, record: Record, reply: Reply) -> None:
        self._pool.submit(self._port.create, key, record, reply)

    def read(self, key: str, reply: Reply) -> None:
        self._pool.submit(self._port.read, key, reply)


def over(client: Client, home: Home, op: str) -> bool:
    """Whether nobody will ask after the operation again: its end is recorded, or nothing of it is kept any more.
    Raises StasisError where the API does not say."""
    checkpoint = _get(client, home)
    if checkpoint is None:
        return True
    operations = (checkpoint.get("status") or {}).get("operations") or []
    mine = next((operation for operation in operations if operation["op"] == op), None)
    return mine is None or any(record["verdict"] == Verdict.ENDED for record in mine.get("records") or ())


def need(client: Client, home: Home) -> Need:
    """What this node's part of a checkpoint is kept for. Raises StasisError where the API does not
    say."""
    checkpoint = _get(client, home)
    if checkpoint is None:
        return Need.NONE
    conditions = (checkpoint.get("status") or {}).get("conditions") or ()
    holds = {str(condition["type"]) for condition in conditions if condition["status"] == "True"}
    if ConditionType.FAILED in holds:
        return Need.NONE
    return Need.SPARE if ConditionType.DURABLE in holds else Need.ALONE


def _get(client: Client, home: Home) -> Any | None:
    """None where it is no more."""
    try:
        with translated(f"checkpoint {home.namespace}/{home.name}"):
            checkpoint = client.get(Checkpoints, home.name, namespace=home.namespace)
    except NotFound:
        return None
    return checkpoint if meta(checkpoint).get("uid") == home.uid else None
