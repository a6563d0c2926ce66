"""When an operation may begin while a checkpoint gathers its cut. No torch, no I/O.

An armed rank passes a gate if and only if it owes something in any channel: a peer has begun an operation there that it
has not. What passes so precedes an operation that a peer has already begun, so the ranks come to rest at the least
consistent cut. To let pass only what is owed in the very channel of the gate deadlocks: what is owed elsewhere may come
after it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from stasis_trainer.channels import Counts
from stasis_trainer.messages import Phase, State

BRIEF_CALLS_END = 5.0  # seconds: none of them waits for a peer


def may_pass(counts: Mapping[str, int], targets: Mapping[str, int]) -> bool:
    return any(counts.get(channel, 0) < target for channel, target in targets.items())


class Busy(Exception):
    """Something has begun, or has not ended, so that the gate cannot shut."""


class Operation(Protocol):
    """One that was begun."""

    def done(self) -> bool: ...

    def help(self) -> None:
        """Bring to an end what ends only when waited for."""


class Gate:
    def __init__(self) -> None:
        self.refused: list[str] = []
        self.rank: int | None = None
        self._bypass = threading.local()
        self.reset()

    def reset(self) -> None:
        """As new, except for what was refused: also in a forked child, where locks may be held by nobody."""
        self._changed = threading.Condition()
        self.phase = Phase.RUNNING
        self._counts: Counts = {}
        self._targets: Counts = {}
        self._members: dict[str, list[int]] = {}
        self._running: dict[int, tuple[str, Operation | None]] = {}
        self._parked: dict[int, str] = {}
        self._tickets = itertools.count()
        self._brief_calls = 0

    # What the trainer's own threads do

    def enter(self, channel: str, members: Sequence[int]) -> int:
        """Wait until an operation may begin, and count it. Every ticket is given to `begun` or `ended`."""
        me = threading.get_ident()
        with self._changed:
            while self._shut or (self.phase is Phase.ARMED and not may_pass(self._counts, self._targets)):
                self._parked[me] = channel
                self._changed.wait()
            self._parked.pop(me, None)
            if channel not in self._members:
                self._members[channel] = list(members)
            self._counts[channel] = self._counts.get(channel, 0) + 1
            ticket = next(self._tickets)
            self._running[ticket] = channel, None
            if len(self._running) > 8:
                self._forget_done()
            return ticket

    def begun(self, ticket: int, operation: Operation) -> None:
        with self._changed:
            self._running[ticket] = self._running[ticket][0], operation

    def ended(self, ticket: int) -> None:
        with self._changed:
            self._running.pop(ticket, None)

    @contextlib.contextmanager
    def operation(self, channel: str, members: Sequence[int]) -> Iterator[None]:
        """One that blocks, and whose parts are not counted again."""
        ticket = self.enter(channel, members)
        try:
            with self.bypass():
                yield
        finally:
            self.ended(ticket)

    @contextlib.contextmanager
    def brief_call(self) -> Iterator[None]:
        """Of a store, or of a group for what is no operation: neither is there while it is torn down."""
        with self._changed:
            while self._shut and not self.bypassed:
                self._changed.wait()
            self._brief_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._brief_calls -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def bypass(self) -> Iterator[None]:
        self._bypass.depth = getattr(self._bypass, "depth", 0) + 1
        try:
            yield
        finally:
            self._bypass.depth -= 1

    @property
    def bypassed(self) -> bool:
        """This thread is within an operation that was counted, or rebuilds."""
        return getattr(self._bypass, "depth", 0) > 0

    def refuse(self, reason: str) -> None:
        """From now on this process cannot be checkpointed with its collectives. Training goes on."""
        with self.brief_call(), self._changed:
            if reason not in self.refused:
                self.refused.append(reason)

    # What the agent asks for

    def arm(self) -> None:
        with self._changed:
            self.phase = Phase.ARMED
            self._targets = {}

    def set_targets(self, targets: Counts) -> None:
        with self._changed:
            self._targets = targets
            self._changed.notify_all()

    def commit(self) -> None:
        with self._changed:
            self._forget_done()
            if self.refused:
                raise Busy("not to be rebuilt: " + "; ".join(self.refused))
            if self._running or may_pass(self._counts, self._targets):
                raise Busy("an operation has begun or is owed")
            self.phase = Phase.COMMITTED
            end = time.monotonic() + BRIEF_CALLS_END
            if not self._changed.wait_for(lambda: not self._brief_calls, max(0.0, end - time.monotonic())):
                self._open()
                raise Busy("a call of a store or group does not end")

    def open(self) -> None:
        with self._changed:
            self._open()

    def _open(self) -> None:
        self.phase = Phase.RUNNING
        self._targets = {}
        self._changed.notify_all()

    def state(self) -> State:
        with self._changed:
            self._forget_done()
            for _, operation in self._running.values():
                if operation:
                    operation.help()
            return State(
                rank=self.rank,
                counts=dict(self._counts),
                members=dict(self._members),
                running=[channel for channel, _ in self._running.values()],
                parked=list(self._parked.values()),
                brief_calls=self._brief_calls,
                refused=list(self.refused),
            )

    @property
    def _shut(self) -> bool:
        return self.phase not in (Phase.RUNNING, Phase.ARMED)

    def _forget_done(self) -> None:
        for ticket, (_, operation) in list(self._running.items()):
            if operation and operation.done():
                del self._running[ticket]


GATE = Gate()
