"""One schedule: a gang, a program of operations, faults, all drawn from one seed and replayed by it.

Time is simulated; every event is a call on a heap. When the heap is empty nothing will ever happen again: then
everything must have ended well.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.faults import Faults
from tests.sim.parties import Agent, GuardianProcess, Leader, Plants, Process
from tests.sim.program import Program
from tests.sim.setting import Setting
from tests.sim.world import FROZEN, RUNNING, Seat, Violation, World

from stasis.core import machine as m
from stasis.core.messages import Decided, Message, Order, Report
from stasis.core.plan import Outcome
from stasis.core.records import Record, Verdict, end_key
from stasis.core.steps import Step

HORIZON = 3_000.0  # seconds; a schedule that still goes on then never ends
CALM_TIME = 400.0  # seconds; faults end then, if not before
SLACK = 60.0  # seconds that a few polls, or a few tries of a step that hangs, may take

Coverage = set[tuple[str, Any, type]]


@dataclass
class Result:
    seed: int
    events: int = 0
    outcomes: list[str] = field(default_factory=list)
    violation: Violation | None = None


class Simulation:
    """`setting`: else drawn from the seed. `coverage` gets (machine, state, event) of all that is handled."""

    def __init__(
        self,
        seed: int,
        setting: Setting | None = None,
        *,
        plants: Plants | None = None,
        coverage: Coverage | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.setting = setting or Setting.draw(self.rng)
        self.plants = plants or Plants()
        self.trace = trace
        self.time = 0.0
        self.size = self.setting.size
        self.world = World(self, devices=self.setting.devices)
        self.program = Program(self, self.setting.program)
        self.records: dict[str, Record] = {}
        self.withdrawn: set[str] = set()
        self.seats: dict[tuple[str, int], Seat] = {}
        self.agents: dict[str, Agent] = {}  # by seat, the last one
        self.guardians: dict[str, GuardianProcess] = {}
        self.leaders: list[Leader] = []
        self.posts: dict[str, Leader] = {}  # leaders by the address of what they lead
        self.processes: set[str] = set()
        self.sent = 0
        self.deaths: list[str] = []
        self.store_down_until = 0.0
        self.calmed = not (self.setting.calm or self.setting.faults or self.setting.triggers)
        self._faults = Faults(self)
        self._coverage: Coverage = set() if coverage is None else coverage
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

    # ------------------------------------------------------------ scheduler

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self.time + delay, self._pushed, call, args))

    def run(self) -> Result:
        result = Result(self.seed)
        try:
            for rank in range(self.size):
                self.make_seat("start", rank).tree = RUNNING
            self.new_leader()
            heap, faults, calm = self._heap, self.setting.faults, self.setting.calm
            while heap:
                self.time, _, call, args = heapq.heappop(heap)
                result.events += 1
                call(*args)
                if not self.calmed:
                    if result.events in faults:
                        self._faults.strike(faults[result.events])
                    if result.events >= calm or self.time > CALM_TIME:
                        self.log("calm")
                        self.calmed = True
                elif self.time > HORIZON:
                    raise Violation("every run ends", f"it still goes on after {HORIZON} s")
            self._check_end()
        except Violation as violation:
            result.violation = violation
            self.log("VIOLATION %s", violation)
        for op, spec in self.program.specs.items():
            end = self.records.get(end_key(op))
            result.outcomes.append(f"{spec.kind}:{end.outcome if end else '?'}")
        return result

    def trigger(self, what: Step | Verdict) -> None:
        """A fault that is to come when a step begins, or a record is written, comes now or soon."""
        for fault in self.setting.triggers.pop(what, ()):
            self.at(self.rng.choice((0.0, 0.0, 0.1, 1.0)) * self.rng.random(), self._faults.strike, fault)

    def chance(self, probability: float) -> bool:
        return not self.calmed and probability > 0 and self.rng.random() < probability

    def log(self, text: str, *args: object) -> None:
        if self.trace:
            self.trace(f"{self.time:9.3f} {text % args}")

    def observe(self, machine: m.Machine[Any], event: m.Event) -> None:
        self._coverage.add((machine.__class__.__name__, machine.state, event.__class__))
        if self.trace and not isinstance(event, m.Tick):
            who = getattr(machine, "rank", "")
            self.log("  %s %s %s <- %s", machine.__class__.__name__, who, machine.state, brief(event))

    # ------------------------------------------------------------ who is there

    def make_seat(self, home: str, rank: int) -> Seat:
        seat = Seat(home, rank, self.time - self.rng.random() * 1e6)
        self.seats[home, rank] = seat
        self.start_agent(seat)
        return seat

    def seat_of(self, op: str, rank: int) -> Seat:
        return self.seats[self.program.home(op), rank]

    def takes_part(self, op: str, seat: Seat) -> bool:
        return self.program.home(op) == seat.home and seat.rank in self.program.specs[op].ranks

    def start_agent(self, seat: Seat) -> None:
        if seat.deleted or not seat.up:
            return
        agent = self.agents[seat.name] = Agent(self, seat)
        self.log("%s starts, boot %s", agent.name, seat.boot)
        agent.pump()

    def agent_died(self, agent: Agent) -> None:
        if not agent.seat.deleted:
            self.at(0.2 + 20 * self.rng.random() ** 2, self._restart_agent, agent)
        guardian = self.guardians.get(agent.seat.name)
        if guardian and guardian.alive and self.rng.random() < 0.5:
            self.at(self.rng.random(), guardian.orphaned, agent)

    def _restart_agent(self, dead: Agent) -> None:
        if self.agents[dead.seat.name] is dead:
            self.start_agent(dead.seat)

    def guardian_died(self, guardian: GuardianProcess) -> None:
        agent = self.agents[guardian.seat.name]
        if agent.guardian is guardian:
            self.at(0.05, agent.post, m.GuardianLost())

    def guarded(self, seat: Seat, op: str) -> bool:
        """Whether the freeze has its guardian, or had it until a fault took it."""
        guardian, agent = self.guardians.get(seat.name), self.agents[seat.name]
        if guardian is None or guardian.op != op:
            return False
        return guardian.killed or (guardian.alive and guardian.machine.deadline <= agent.member.deadline)

    def new_leader(self) -> None:
        leader = Leader(self, len(self.leaders) + 1)
        self.leaders.append(leader)
        leader.lead()

    def leader_died(self) -> None:
        self.at(0.5 + 20 * self.rng.random() ** 2, self.new_leader)

    def delete(self, seat: Seat) -> None:
        """The container goes, with all that is in it; leaders hear of it."""
        if seat.deleted:
            return
        self.log("%s is deleted", seat.name)
        seat.deleted = True
        self.world.kill(seat, 137)
        for process in (self.agents.get(seat.name), self.guardians.get(seat.name)):
            if process is not None:
                process.alive = False
        for leader in self.leaders:
            if leader.spec is not None and self.takes_part(leader.spec.op, seat):
                self.at(self.rng.random(), leader.post_about, leader.spec.op, m.Lost(seat.rank))

    # ------------------------------------------------------------ network

    def send(self, sender: Process, to: str, message: Message) -> None:
        setting = self.setting
        self.sent += 1
        if self.sent == setting.drop or self.chance(setting.loss):
            return
        self.at(self._latency(), self._deliver, sender.seat, to, message)
        if self.sent == setting.double_late:
            self.at(20.0, self._deliver, sender.seat, to, message)
        if self.chance(setting.double):
            self.at(self._latency() * 5, self._deliver, sender.seat, to, message)

    def _latency(self) -> float:
        delay = min(self.setting.delay, 0.1) if self.calmed else self.setting.delay
        return 0.001 + delay * self.rng.random() ** 2

    def _deliver(self, origin: Seat | None, to: str, message: Message) -> None:
        if isinstance(message, Report):
            leader = self.posts.get(to)
            if leader is not None and (origin is None or origin.cut_until <= self.time):
                leader.post_about(message.op, message)
            return
        op, _, rank = to.partition("#")
        seat = self.seat_of(op, int(rank))
        agent = self.agents[seat.name]
        if seat.deleted or not agent.alive or seat.cut_until > self.time:
            return
        machine = agent.member
        before = (machine.state, machine.begun, machine.op)
        late, stalled = message.epoch < seat.seen_epoch, agent.stalled_until > self.time
        due = machine.wake_at is not None and machine.wake_at <= agent.now()
        agent.post(message)
        if late and not stalled and not due and (machine.state, machine.begun, machine.op) != before:
            raise Violation("one leader", f"{seat.name} obeys epoch {message.epoch} after {seat.seen_epoch}")
        if not stalled and agent.alive:
            seat.seen_epoch = max(seat.seen_epoch, message.epoch)

    # ------------------------------------------------------------ store

    def store(self, process: Process, key: str, record: Record | None) -> None:
        self.at(self._latency(), self._store_arrives, process, process.driver, key, record)

    def _store_arrives(self, process: Process, driver: object, key: str, record: Record | None) -> None:
        down = max(self.store_down_until, process.store_down_until) > self.time
        failed = down or self.chance(self.setting.store)
        # A write whose answer is lost may have happened.
        if record is not None and (not failed or self.chance(0.3)):
            self._write(key, record)
        answer = m.RecordsDown(key) if failed else m.RecordIs(key, self.records.get(key))
        self.at(self._latency(), self._store_answers, process, driver, answer)

    def _write(self, key: str, record: Record) -> None:
        if key in self.records and not self.plants.last_writer_wins:
            return
        self.records[key] = record
        self.log("RECORD %s: %s by epoch %s", key, record.verdict, record.epoch)
        self.world.check_record(record)
        if record.verdict in (Verdict.ABORT, Verdict.CONTINUE):
            for rank in self.program.specs[record.op].ranks:
                seat = self.seat_of(record.op, rank)
                if seat.tree == FROZEN and seat.voted:
                    self.at(SLACK, self._check_voted, seat, seat.freeze, self.time)
        self.trigger(record.verdict)

    def _store_answers(self, process: Process, driver: object, answer: m.Event) -> None:
        if process.driver is driver:
            process.post(answer)

    # ------------------------------------------------------------ deadlines

    def watch_freeze(self, seat: Seat, deadline: float) -> None:
        self.at(deadline + 10, self._check_freeze, seat, seat.freeze)

    def _check_freeze(self, seat: Seat, freeze: int) -> None:
        """Before its vote a tree is thawed within its deadline, or soon after somebody is there to do it."""
        if seat.tree != FROZEN or seat.freeze != freeze or seat.deleted or seat.voted:
            return
        guardian, agent = self.guardians.get(seat.name), self.agents[seat.name]
        if guardian is not None and guardian.alive and self.time - guardian.started_at > 10:
            raise Violation("thawed in time", f"{seat.name} is frozen past its deadline, its guardian lives")
        if agent.alive and self.time - max(agent.started_at, agent.stalled_until) > SLACK:
            raise Violation("thawed in time", f"{seat.name} is frozen past its deadline, its agent lives")
        self.at(SLACK, self._check_freeze, seat, freeze)

    def _check_voted(self, seat: Seat, freeze: int, since: float) -> None:
        """After its vote a tree is thawed as soon as somebody can read that it may."""
        if seat.tree != FROZEN or seat.freeze != freeze or seat.deleted:
            return
        for process in (self.guardians.get(seat.name), self.agents[seat.name]):
            if process is None or not process.alive:
                continue
            hindered = max(process.started_at, process.stalled_until, process.store_down_until, self.store_down_until)
            if self.time - max(hindered, since) > SLACK:
                raise Violation("thawed as recorded", f"{seat.name} is frozen, though {process.name} could know better")
        self.at(SLACK, self._check_voted, seat, freeze, since)

    # ------------------------------------------------------------ the end

    def _check_end(self) -> None:
        ends = {op: self.records.get(end_key(op)) for op in self.program.specs}
        for op, end in ends.items():
            if end is None:
                raise Violation("every run ends", f"{op} has not ended, and nothing will ever happen again")
        for leader in self.leaders:
            if leader.alive and leader.spec is not None:
                raise Violation("every run ends", f"{leader.name} waits for ever")
        last = {self.program.home(op): end for op, end in ends.items()}
        for seat in self.seats.values():
            end = last.get(seat.home)
            if not seat.deleted and (end is None or end.outcome != Outcome.BROKEN):
                self.world.check_free(seat, "all has ended")


def brief(event: m.Event) -> str:
    """An event in a trace."""
    match event:
        case Order(op, epoch=epoch, attempt=attempt, index=index):
            return f"Order({op}, attempt {attempt}, epoch {epoch}, stage {index})"
        case Decided(op, epoch=epoch, attempt=attempt, record=record):
            return f"Decided({op}, attempt {attempt}, epoch {epoch}: {record.verdict})"
        case Report():
            return f"Report(rank {event.rank}: {event.standing} {event.index} {event.failure or ''})"
        case m.RecordIs(key, record):
            return f"RecordIs({key}: {record.verdict if record else None})"
        case m.Booted():
            return "Booted"
        case _:
            return str(event)
