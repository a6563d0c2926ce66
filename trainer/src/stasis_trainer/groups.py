"""All groups and stores of this process: torn down and rebuilt together."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from stasis_trainer import sockets, work
from stasis_trainer.gate import GATE
from stasis_trainer.handle import HANDLES
from stasis_trainer.store import STORES, unjournaled


def _in_order() -> list[Any]:
    return sorted(HANDLES, key=lambda handle: handle.order)


def teardown() -> None:
    """Groups go, the newest first; stores stay until every process has saved what it set."""
    for alive in list(work.ALIVE):
        alive.release()
    for handle in reversed(_in_order()):
        handle.teardown()
    with GATE.bypass():
        for store in STORES:
            store.save()


def close() -> None:
    for store in sorted(STORES, key=lambda store: store.server):
        store.close()


def rebuild(epoch: str, endpoints: dict[str, list[Any]], environment: dict[str, str], timeout: float) -> None:
    """Stores first, servers before clients. Can be tried again with another epoch after it failed."""
    os.environ.update(environment)
    with GATE.bypass(), unjournaled(), sockets.opening():
        for store in sorted(STORES, key=lambda store: not store.server):
            store.rebuild(endpoints)
        living = [handle for handle in _in_order() if not handle.destroyed]
        for handle in living:
            handle.rebuild(epoch, timedelta(seconds=timeout))
        for handle in living:
            handle.connect()


def stores() -> list[dict[str, Any]]:
    """Endpoints as the trainer knows them, by which `rebuild` is told where they are now."""
    return [{"endpoint": "{}:{}".format(*store.endpoint), "server": store.server} for store in STORES]
