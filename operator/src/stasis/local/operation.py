"""Run one operation of a gang on this machine: its coordinator and all its members, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stasis.agent.agent import Agent, trim
from stasis.agent.runner import BootClock, RecordsPort, Runner
from stasis.core import machine as m
from stasis.core.agreement import agreement
from stasis.core.driver import CoordinatorDriver
from stasis.core.gang import Coordinator
from stasis.core.messages import member_address
from stasis.core.plan import Kind, Outcome, Spec
from stasis.core.records import Failure, Record, Verdict, decision_key
from stasis.core.steps import Step
from stasis.errors import StasisError
from stasis.local.bus import Bus

OnStage = Callable[[str], None]  # told each step that begins and each record that is written


@dataclass
class Report:
    """What became of an operation. `results`: what each rank returned, by step; `seconds`: from the operation's start
    to the barrier after each step, the last of its kind."""

    op: str
    kind: Kind
    outcome: Outcome
    failures: tuple[Failure, ...]
    results: dict[Step, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    seconds: dict[Step, float] = field(default_factory=dict)
    commit: Record | None = None

    @property
    def succeeded(self) -> bool:
        return self.outcome in (Outcome.RELEASED, Outcome.CONTINUED, Outcome.RESTORED)


class LocalAgent(Agent):
    """The agent and the coordinator of one gang's operations. `state` is theirs alone and outlives them.

    `status(rank)` tells how a rank's container ended, None while it runs.
    """

    def __init__(
        self,
        state: Path,
        *,
        status: Callable[[int], int | None] = lambda rank: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(state)
        self._status = status
        self._progress = progress

    def next_serial(self) -> int:
        """Of the next operation; grows for ever."""
        return self._count("serial")

    def next_epoch(self) -> int:
        """Of the next coordinator: higher than that of any before."""
        return self._count("epoch")

    def _count(self, what: str) -> int:
        entry = self.state.read("counter", what) or {"value": 0}
        value = int(entry["value"]) + 1
        self.state.write("counter", what, {"value": value})
        return value

    def run(self, spec: Spec, on_stage: OnStage = lambda what: None) -> Report:
        """Run an operation to its end. It is journaled first, and `unfinished` until the caller has done what its end
        asks for, and calls `settle`."""
        self.state.write("operation", spec.op, spec.to_dict())
        return _Run(self, spec, on_stage).run()

    def unfinished(self) -> list[Spec]:
        """Operations that an agent before this one began and did not end, oldest first: `run` goes on with them."""
        specs = []
        for name in self.state.names("operation"):
            if (data := self.state.read("operation", name)) is not None:
                specs.append(Spec.from_dict(data))
        return sorted(specs, key=lambda spec: spec.serial)

    def settle(self, report: Report) -> None:
        """Forget an ended operation, and its records unless it made a checkpoint."""
        self.forget(report.op)
        self.state.remove("operation", report.op)
        if report.outcome in (Outcome.ABORTED, Outcome.RESTORED, Outcome.BROKEN, Outcome.ABANDONED):
            self.records.forget(report.op)
        trim()

    def rank(self, spec: Spec, rank: int, bus: Bus, clock: BootClock) -> Runner:
        """One rank's member, on the bus."""

        def progress(count: int) -> None:
            if self._progress:
                self._progress(rank, count)

        runner = self.member(
            spec.op, rank, clock=clock, transport=bus, status=lambda: self._status(rank), progress=progress
        )
        bus.drivers[member_address(spec.op, rank)] = runner.driver
        return runner


class _Run:
    def __init__(self, agent: LocalAgent, spec: Spec, on_stage: OnStage) -> None:
        self._agent = agent
        self._spec = spec
        self._on_stage = on_stage
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._report: Report | None = None
        self._results: dict[Step, Mapping[int, Mapping[str, Any]]] = {}
        self._seconds: dict[Step, float] = {}

    def run(self) -> Report:
        spec, clock, bus = self._spec, BootClock(), Bus()
        runners = [self._agent.rank(spec, rank, bus, clock) for rank in spec.ranks]
        coordinator = Coordinator(spec, self._agent.next_epoch(), agreement(spec))
        leader = Runner(
            lambda wake: CoordinatorDriver(
                coordinator,
                clock=clock,
                transport=bus,
                records=RecordsPort(self._agent.records),
                notify=self._notify,
                wake=wake,
            ),
            clock,
        )
        bus.drivers[coordinator.address] = leader.driver
        runners.append(leader)
        try:
            for runner in runners:
                runner.start()
            while not self._ended.wait(0.2):
                _raise_failure(runners)
        finally:
            for runner in runners:
                runner.stop()
        _raise_failure(runners)
        assert self._report is not None
        return self._report

    def _committed(self) -> Record | None:
        """The checkpoint's Commit, whoever wrote it."""
        decision = self._agent.records.read(decision_key(self._spec.op))
        return decision if decision is not None and decision.verdict is Verdict.COMMIT else None

    def _notify(self, notice: m.Notice) -> None:
        if isinstance(notice, m.StageBegun):
            self._on_stage(notice.stage.step)
        elif isinstance(notice, m.StageDone):
            self._results[notice.stage.step] = notice.results
            self._seconds[notice.stage.step] = time.monotonic() - self._started
        elif isinstance(notice, m.Recorded):
            self._on_stage(notice.record.verdict)
        else:
            self._report = Report(
                self._spec.op,
                self._spec.kind,
                notice.outcome,
                notice.failures,
                self._results,
                self._seconds,
                self._committed(),
            )
            self._ended.set()


def _raise_failure(runners: Iterable[Runner]) -> None:
    for runner in runners:
        if runner.failure is not None:
            raise StasisError(f"the protocol's driver failed: {runner.failure!r}") from runner.failure
