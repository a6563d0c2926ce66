"""Carries a machine's effects out over ports: the same loop in the product and in the simulation.

Ports do not block for long. What takes time answers by an event, given to `Driver.post` of the machine that asked;
what is answered at once may be posted from within the call. Nothing here knows threads or clocks: whoever owns the
driver calls `pump` when something was posted (`wake` tells) and when the time that `pump` returned has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from stasis.core import machine as m
from stasis.core.gang import Coordinator
from stasis.core.guardian import Guardian
from stasis.core.member import Member
from stasis.core.messages import Message
from stasis.core.records import Record
from stasis.core.steps import Step


class Clock(Protocol):
    def now(self) -> float:
        """CLOCK_BOOTTIME in seconds."""
        ...


class Transport(Protocol):
    def send(self, to: str, message: Message) -> None:
        """Deliver to the driver at this address, if it can; the machines repeat what is not answered."""
        ...


Reply = Callable[[m.Event], None]


class Records(Protocol):
    """Write-once records. Each call answers `reply` exactly once, with RecordIs or RecordsDown."""

    def create(self, key: str, record: Record, reply: Reply) -> None: ...

    def read(self, key: str, reply: Reply) -> None: ...


class Executor(Protocol):
    """One rank's steps; see `machine.Start`. `reply` gets StepDone or StepFailed, also TreeExited at any time."""

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None: ...


class GuardianPort(Protocol):
    """The guardian of one rank's freeze, as its agent sees it. The fate survives both of them."""

    def arm(self, op: str, deadline: float, poll: float, reply: Reply) -> None:
        """Start it unless it lives, and have it hold the deadline; `reply` gets GuardianUp or GuardianLost, and
        GuardianLost if it dies later. A new `op` begins a new fate."""
        ...

    def claim(self, value: str) -> str:
        """Decide the fate unless it is decided; what it is then. Atomic between agent and guardian."""
        ...

    def fate(self) -> str | None:
        """ "voted", "fired", "" where nothing is claimed yet; None where there is no guardian's state at all."""
        ...

    def disarm(self) -> None:
        """End it and forget the fate. When this returns it acts no more."""
        ...


class Journal(Protocol):
    """One rank's journal: the last dict saved, durable when `save` returns."""

    def load(self) -> dict[str, Any] | None: ...

    def save(self, journal: Mapping[str, Any]) -> None: ...


class FatePort(Protocol):
    """The guardian's side of GuardianPort."""

    def claim(self, value: str) -> str: ...

    def fate(self) -> str | None: ...


class Tree(Protocol):
    def rescue(self) -> bool:
        """Unlock the network, thaw; whether both succeeded."""
        ...


Perform = Mapping[type, Callable[[Any], None]]
Observer = Callable[[m.Machine[Any], m.Event], None]


class Driver:
    """One machine's loop. `post` may be called from any thread, `pump` from one at a time."""

    def __init__(
        self,
        machine: m.Machine[Any],
        clock: Clock,
        *,
        wake: Callable[[], None] | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.machine = machine
        self._clock = clock
        self._wake = wake
        self._observe = observe
        self._inbox: deque[m.Event] = deque()
        self._perform: Perform = {}

    def post(self, event: m.Event) -> None:
        self._inbox.append(event)
        if self._wake:
            self._wake()

    def pump(self) -> float | None:
        """Handle all that was posted and is due; the time of the next Tick, None if only an event can go on."""
        machine, inbox = self.machine, self._inbox
        while True:
            now = self._clock.now()
            if inbox:
                event = inbox.popleft()
            elif machine.wake_at is not None and machine.wake_at <= now:
                event = m.Tick()
            else:
                return machine.wake_at
            if self._observe:
                self._observe(machine, event)
            for effect in machine.handle(event, now):
                self._perform[type(effect)](effect)

    def _records(self, records: Records) -> dict[type, Callable[[Any], None]]:
        return {
            m.Create: lambda e: records.create(e.key, e.record, self.post),
            m.Read: lambda e: records.read(e.key, self.post),
        }


class CoordinatorDriver(Driver):
    """Leads one operation; `notify` gets what is for the caller's eyes. Its first event is posted here."""

    def __init__(
        self,
        machine: Coordinator,
        *,
        clock: Clock,
        transport: Transport,
        records: Records,
        notify: Callable[[m.Notice], None],
        wake: Callable[[], None] | None = None,
        observe: Observer | None = None,
    ) -> None:
        super().__init__(machine, clock, wake=wake, observe=observe)
        self._perform = {
            m.Send: lambda e: transport.send(e.to, e.message),
            **self._records(records),
            **dict.fromkeys((m.StageBegun, m.StageDone, m.Recorded, m.Ended), notify),
        }
        self.post(m.Started())


class MemberDriver(Driver):
    """One rank's side, from the agent's start on: the journal is read and reconciled first."""

    def __init__(
        self,
        machine: Member,
        *,
        boot: str,
        clock: Clock,
        transport: Transport,
        records: Records,
        executor: Executor,
        guardian: GuardianPort,
        journal: Journal,
        wake: Callable[[], None] | None = None,
        observe: Observer | None = None,
    ) -> None:
        super().__init__(machine, clock, wake=wake, observe=observe)
        self._perform = {
            m.Save: lambda e: journal.save(e.journal),
            m.Send: lambda e: transport.send(e.to, e.message),
            m.Start: lambda e: executor.start(e.step, e.op, e.attempt, e.args, e.token, e.limit, self.post),
            m.Arm: lambda e: guardian.arm(e.op, e.deadline, e.poll, self.post),
            m.Claim: lambda e: self._inbox.appendleft(m.Fate(guardian.claim(e.value))),
            m.Disarm: lambda e: guardian.disarm(),
            **self._records(records),
        }
        self.post(m.Booted(journal.load(), guardian.fate(), boot))


class GuardianDriver(Driver):
    """The guardian process's loop."""

    def __init__(
        self,
        machine: Guardian,
        *,
        clock: Clock,
        records: Records,
        fate: FatePort,
        tree: Tree,
        observe: Observer | None = None,
    ) -> None:
        super().__init__(machine, clock, observe=observe)
        self._perform = {
            m.Claim: lambda e: self._inbox.appendleft(m.Fate(fate.claim(e.value))),
            m.Look: lambda e: self._inbox.appendleft(m.Fate(fate.fate())),
            m.Rescue: lambda e: self._inbox.appendleft(m.Rescued(tree.rescue())),
            **self._records(records),
        }
