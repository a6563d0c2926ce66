"""A work queue that forgets nothing: what fails is tried again, and a key is worked on by one worker at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_RETRY = 0.2  # seconds; doubled with each failure
LAST_RETRY = 30.0


class WorkQueue(Generic[K]):
    """Keys to be worked on. Adding one that waits already changes nothing; one that is being worked on comes again.

    `work(key)` returns after how many seconds the key is to come again, or None. Where it raises, the key comes again
    too, later with each time. Used from within one event loop.
    """

    def __init__(self, work: Callable[[K], Awaitable[float | None]]) -> None:
        self._work = work
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()  # in `_ready`
        self._busy: set[K] = set()
        self._dirty: set[K] = set()  # added while busy
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._bell = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: K) -> None:
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._busy:
            self._dirty.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._bell.set()

    def add_later(self, key: K, seconds: float) -> None:
        """Unless it comes sooner."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        timer = self._timers.get(key)
        if key in self._waiting or key in self._dirty or (timer is not None and timer.when() <= due):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self.add, key)

    async def run(self, workers: int = 8) -> None:
        """Work until cancelled; what was not done stays in the queue."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(workers):
                    tasks.create_task(self._worker())
        finally:
            for timer in self._timers.values():
                timer.cancel()
            for key in [*self._timers, *self._dirty]:
                self._timers.pop(key, None)
                self.add(key)
            self._dirty.clear()

    async def _worker(self) -> None:
        while True:
            while not self._ready:
                self._bell.clear()
                await self._bell.wait()
            key = self._ready.popleft()
            self._waiting.discard(key)
            self._busy.add(key)
            try:
                await self._once(key)
            finally:
                self._busy.discard(key)
                if key in self._dirty:
                    self._dirty.discard(key)
                    self.add(key)

    async def _once(self, key: K) -> None:
        try:
            again = await self._work(key)
        except asyncio.CancelledError:
            self._dirty.add(key)
            raise
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again = min(LAST_RETRY, FIRST_RETRY * 2 ** min(failures - 1, 16))
            log.warning("%s: %s: %s; again in %.1f s", key, type(error).__name__, error, again)
            log.debug("%s", key, exc_info=error)
        else:
            with contextlib.suppress(KeyError):
                del self._failures[key]
        if again is not None:
            self._busy.discard(key)
            self.add_later(key, again)
