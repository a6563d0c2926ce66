"""What carries a driver's machine on, wherever it runs: a clock, a thread, records that are written once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from stasis.core import machine as m
from stasis.core.driver import Driver, Reply
from stasis.core.records import Record
from stasis.errors import StasisError


class BootClock:
    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class Runner:
    """A thread that pumps one driver whenever something was posted or is due; `close` is called when it is stopped,
    `failed` where the driver ends by an error."""

    def __init__(
        self,
        make: Callable[[Callable[[], None]], Driver],
        clock: BootClock,
        close: Callable[[], None] = lambda: None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._clock = clock
        self._close = close
        self._failed = failed
        self._bell = threading.Event()
        self._stopped = False
        self.failure: BaseException | None = None
        self.driver = make(self._bell.set)
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._bell.clear()
                due = self.driver.pump()
                self._bell.wait(None if due is None else max(0.0, due - self._clock.now()))
        except BaseException as error:
            self.failure = error
            self._failed(error)

    def stop(self) -> None:
        self._stopped = True
        self._bell.set()
        self._thread.join()
        self._close()


class RecordsStore(Protocol):
    """Where records are: a node's folder, a cluster's API. Both calls raise StasisError or OSError where it cannot be
    said what is there; a `create` may have taken effect all the same."""

    def create(self, key: str, record: Record) -> Record:
        """Write a record and return the one that is there afterwards, whoever wrote it."""
        ...

    def read(self, key: str) -> Record | None: ...


class RecordsPort:
    """A store of records as a driver's port; one that fails answers RecordsDown."""

    def __init__(self, store: RecordsStore) -> None:
        self._store = store

    def create(self, key: str, record: Record, reply: Reply) -> None:
        self._answer(key, lambda: self._store.create(key, record), reply)

    def read(self, key: str, reply: Reply) -> None:
        self._answer(key, lambda: self._store.read(key), reply)

    def _answer(self, key: str, work: Callable[[], Record | None], reply: Reply) -> None:
        try:
            reply(m.RecordIs(key, work()))
        except (OSError, StasisError):
            reply(m.RecordsDown(key))
