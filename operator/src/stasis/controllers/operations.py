"""The coordinators of this leader: one thread for each operation that is under way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightkube import Client

from stasis.agent.runner import BootClock, RecordsPort, Runner
from stasis.controllers.agents import Agents
from stasis.controllers.description import Description
from stasis.core import machine as m
from stasis.core.agreement import agreement
from stasis.core.driver import CoordinatorDriver
from stasis.core.frames import Answer, Command, Forget, Home, Progress
from stasis.core.gang import Coordinator
from stasis.core.messages import Decided, Message, Order
from stasis.core.plan import Outcome
from stasis.core.steps import Step
from stasis.kube.records import ApiRecords

log = logging.getLogger(__name__)

Results = dict[Step, Mapping[int, Mapping[str, Any]]]


@dataclass
class _Led:
    """An operation that this process leads."""

    home: Home
    description: Description
    address: str
    runner: Runner
    trainjob: str
    told: Callable[[], None]  # something changed that only this process knows
    results: Results = field(default_factory=dict)  # what each rank returned, by step
    withdrawn: bool = False
    lost: set[int] = field(default_factory=set)
    stage: Step | None = None
    frozen_at: float | None = None  # of our clock: since when ranks stand still
    stored: dict[int, int] = field(default_factory=dict)  # rank -> bytes so far
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Standing:
    """Of an operation that is led here. `frozen`: for how many seconds its ranks have stood still, None if they run."""

    namespace: str
    trainjob: str
    kind: str
    step: str
    frozen: float | None


@dataclass(frozen=True)
class News:
    """How far an operation is. By rank: bytes that are stored so far, and that were captured."""

    home: Home
    op: str
    step: str
    stored: Mapping[int, int]
    sizes: Mapping[int, int]


class _Transport:
    """To the members of one operation, over their nodes' connections."""

    def __init__(self, agents: Agents, home: Home, nodes: Mapping[int, str], credentials: str) -> None:
        self._agents = agents
        self._credentials = credentials
        self._home = home
        self._nodes = nodes

    def send(self, to: str, message: Message) -> None:
        assert isinstance(message, Order | Decided)
        self._agents.send(self._nodes[int(to.rpartition("#")[2])], Command(to, message, self._home, self._credentials))


class Operations:
    """Used from within the event loop, but for `tell`'s callers. `epoch()`: higher with each call."""

    def __init__(self, client: Client, agents: Agents, epoch: Callable[[], int]) -> None:
        self._client = client
        self._agents = agents
        self._epoch = epoch
        self._led: dict[str, _Led] = {}

    def drive(
        self,
        home: Home,
        trainjob: str,
        description: Description,
        *,
        credentials: str,
        withdraw: bool,
        lost: Iterable[int],
        told: Callable[[], None],
    ) -> None:
        """See that the operation is led from here. `told` is called, in any thread, when there is news of it;
        `credentials` go with the orders."""
        op = description.spec.op
        led = self._led.get(op)
        if led is not None and (led.runner.failure is not None or led.outcome is Outcome.SUPERSEDED):
            log.error("operation %s: its coordinator ended (%r); another one takes over", op, led.runner.failure)
            self._drop(op)
            led = None
        if led is None:
            led = self._led[op] = self._lead(home, trainjob, description, credentials, told)
            led.runner.start()
        if withdraw and not led.withdrawn:
            led.withdrawn = True
            led.runner.driver.post(m.Withdraw())
        for rank in sorted(set(lost) - led.lost):
            led.lost.add(rank)
            led.runner.driver.post(m.Lost(rank))

    def _lead(
        self, home: Home, trainjob: str, description: Description, credentials: str, told: Callable[[], None]
    ) -> _Led:
        spec, clock = description.spec, BootClock()
        coordinator = Coordinator(spec, self._epoch(), agreement(spec))
        runner = Runner(
            lambda wake: CoordinatorDriver(
                coordinator,
                clock=clock,
                transport=_Transport(self._agents, home, description.nodes, credentials),
                records=RecordsPort(ApiRecords(self._client, home.namespace, home.name, home.uid)),
                notify=lambda notice: _note(led, notice),
                wake=wake,
            ),
            clock,
        )
        led = _Led(home, description, coordinator.address, runner, trainjob, told)
        context = {"namespace": home.namespace, "job": trainjob, "checkpoint": home.name, "operation": spec.op}
        log.info("leads operation %s (%s) of ranks %s", spec.op, spec.kind, list(spec.ranks), extra=context)
        return led

    def leads(self, op: str) -> bool:
        return op in self._led

    def hear(self, frame: Answer | Progress) -> None:
        """What an agent says."""
        if isinstance(frame, Answer):
            led = self._led.get(frame.message.op)
            if led is not None and led.address == frame.to:
                led.runner.driver.post(frame.message)
        elif led := self._led.get(frame.op):
            led.stored[frame.rank] = frame.bytes

    def standing(self) -> list[Standing]:
        now = BootClock().now()
        return [
            Standing(
                led.home.namespace,
                led.trainjob,
                str(led.description.spec.kind),
                str(led.stage or ""),
                None if led.frozen_at is None else now - led.frozen_at,
            )
            for led in self._led.values()
        ]

    def news(self) -> list[News]:
        """Of all that are led here and have not ended."""
        return [
            News(
                led.home,
                op,
                str(led.stage),
                dict(led.stored),
                {rank: int(told["size"]) for rank, told in led.results.get(Step.CAPTURE, {}).items() if "size" in told},
            )
            for op, led in self._led.items()
            if led.stage is not None and led.outcome is None
        ]

    def results(self, op: str) -> Results:
        """What its ranks returned, as far as this process has led it."""
        led = self._led.get(op)
        return led.results if led else {}

    def forget(self, description: Description) -> None:
        """The operation's end is recorded and concluded."""
        op = description.spec.op
        for node in set(description.nodes.values()):
            self._agents.send(node, Forget(op))
        self._drop(op)

    def _drop(self, op: str) -> None:
        if led := self._led.pop(op, None):
            led.runner.stop()

    def stop(self) -> None:
        """Lead no more; another process goes on from the records."""
        for op in list(self._led):
            self._drop(op)


def _note(led: _Led, notice: m.Notice) -> None:
    """In the coordinator's thread."""
    match notice:
        case m.StageBegun():
            led.stage = notice.stage.step
            if led.stage is Step.FREEZE:
                led.frozen_at = BootClock().now()
        case m.StageDone():
            if notice.stage.step is Step.THAW:
                led.frozen_at = None
            led.results[notice.stage.step] = notice.results
        case m.Ended():
            led.outcome, led.frozen_at = notice.outcome, None
            led.told()
        case m.Recorded():
            led.told()
