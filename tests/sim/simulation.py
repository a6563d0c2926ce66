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

from tests.sim.world import DEAD, FROZEN, NONE, RUNNING, Seat, Violation, World

from stasis.core import machine as m
from stasis.core.gang import Coordinator
from stasis.core.guardian import Guardian
from stasis.core.member import Member
from stasis.core.messages import Message, Report
from stasis.core.plan import Kind, Outcome, Spec, Timing
from stasis.core.records import Record, Verdict, decision_key, end_key, release_key
from stasis.core.steps import Step

HORIZON = 20_000.0  # seconds; a schedule that still goes on then never ends
TIMING = Timing(
    prepared=60, frozen=60, storing=120, margin=3, resend=1, poll=3, retry=1, step=10, lease=15, takeover=10
)
SLACK = 60.0  # what a few polls, or a few tries of a step that hangs, may take
PROGRAMS = ("S", "SR", "SR", "C", "CS", "CSR", "CB", "SRC", "SRSR", "CSRCSR")


@dataclass(frozen=True)
class Plants:
    """Bugs to plant: what is run instead of the product's machines and of a right store."""

    coordinator: type[Coordinator] = Coordinator
    member: type[Member] = Member
    guardian: type[Guardian] = Guardian
    last_writer_wins: bool = False
    no_guardian: bool = False


Coverage = set[tuple[str, Any, type]]


@dataclass
class Result:
    seed: int
    events: int = 0
    outcomes: list[str] = field(default_factory=list)
    violation: Violation | None = None


class Simulation:
    def __init__(
        self,
        seed: int,
        *,
        plants: Plants | None = None,
        coverage: Coverage | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.plants = plants or Plants()
        self.trace = trace
        self.coverage: Coverage = set() if coverage is None else coverage
        self.time = 0.0
        self.count = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

        self.size = rng.choice((1, 2, 2, 2, 3, 3, 4))
        self.program = list(rng.choice(PROGRAMS))
        self.world = World(self, devices=rng.random() < 0.4)
        self.records: dict[str, Record] = {}
        self.specs: dict[str, Spec] = {}
        self.withdrawn: set[str] = set()
        self.addresses: dict[str, Any] = {}  # leaders by address, agents by seat
        self.agents: dict[str, Any] = {}
        self.guardians: dict[str, Any] = {}
        self.leaders: list[Any] = []
        self.epoch = 0
        self.incarnation = "start"
        self.finished: set[int] = set()
        self.restores = 0
        self._seats: dict[tuple[str, int], Seat] = {}
        self._homes: dict[str, str] = {}

        # How bad the world is.
        bad = rng.random() < 0.9
        self.p_loss = rng.choice((0.0, 0.0, 0.05, 0.25)) if bad else 0.0
        self.p_double = rng.choice((0.0, 0.1)) if bad else 0.0
        self.delay = rng.choice((0.01, 0.1, 0.1, 3.0)) if bad else 0.01
        self.p_fail = rng.choice((0.0, 0.0, 0.01, 0.08)) if bad else 0.0
        self.p_hang = rng.choice((0.0, 0.0, 0.01, 0.05)) if bad else 0.0
        self.p_store = rng.choice((0.0, 0.0, 0.1, 0.4)) if bad else 0.0
        self.store_down_until = 0.0
        self.cut_until: dict[str, float] = {}
        self._faults: dict[int, Callable[[], None]] = {}
        self._calm_at = 0
        if bad:
            self._draw_faults()

    # ------------------------------------------------------------ scheduler

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self.time + delay, self._pushed, call, args))

    def run(self) -> Result:
        result = Result(self.seed)
        try:
            self._start()
            heap, faults, pop = self._heap, self._faults, heapq.heappop
            while heap:
                self.time, _, call, args = pop(heap)
                self.count += 1
                call(*args)
                if self.count in faults:
                    faults[self.count]()
                if self.count == self._calm_at or (self.time > 400 and self.p_loss >= 0):
                    self._calm()
                if self.time > HORIZON:
                    raise Violation("every run ends", f"it still goes on after {HORIZON} s")
            self._check_end()
        except Violation as violation:
            result.violation = violation
            self.log("VIOLATION %s", violation)
        result.events = self.count
        result.outcomes = [
            f"{spec.kind}:{self.records[end_key(op)].outcome}" if end_key(op) in self.records else f"{spec.kind}:?"
            for op, spec in self.specs.items()
        ]
        return result

    def log(self, text: str, *args: object) -> None:
        if self.trace:
            self.trace(f"{self.time:9.3f} {text % args}")

    def observe(self, machine: m.Machine[Any], event: m.Event) -> None:
        self.coverage.add((machine.__class__.__name__, machine.state, event.__class__))
        if self.trace and not isinstance(event, m.Tick):
            who = getattr(machine, "rank", None)
            name = machine.__class__.__name__ + ("" if who is None else f" {who}")
            self.log("  %s %s <- %s", name, machine.state, _brief(event))

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    # ------------------------------------------------------------ what is run

    def coordinator(self, spec: Spec, epoch: int) -> Coordinator:
        return self.plants.coordinator(spec, epoch)

    def member(self, rank: int) -> Member:
        return self.plants.member(rank)

    def guardian(self, op: str, deadline: float, poll: float) -> Guardian:
        return self.plants.guardian(op, deadline, poll)

    def seat_of(self, op: str, rank: int) -> Seat:
        return self._seats[self._homes[op], rank]

    def takes_part(self, op: str, seat: Seat) -> bool:
        return self._homes[op] == seat.home and seat.rank in self.specs[op].ranks

    def clock_of(self, seat: Seat) -> float:
        return self.time - seat.base

    def duration(self, step: Step) -> float:
        scale = 6.0 if step in (Step.STORE, Step.RESTORE) else 1.5 if step is Step.CAPTURE else 0.3
        return 0.002 + scale * self.rng.random() ** 3

    def _start(self) -> None:
        for rank in range(self.size):
            self._make_seat("start", rank).tree = RUNNING
        self.new_leader()

    def _make_seat(self, home: str, rank: int) -> Seat:
        seat = Seat(home, rank, self.time - self.rng.random() * 1e6)
        self._seats[home, rank] = seat
        self.world.seats.append(seat)
        self.start_agent(seat)
        return seat

    def start_agent(self, seat: Seat) -> None:
        from tests.sim.parties import Agent

        if seat.deleted or not seat.up:
            return
        agent = Agent(self, seat)
        self.agents[seat.name] = agent
        self.log("%s starts, boot %s", agent.name, seat.boot)
        agent.pump()

    def new_leader(self) -> None:
        from tests.sim.parties import Leader

        self.epoch += 1
        leader = Leader(self, self.epoch)
        self.leaders.append(leader)
        leader.lead()

    # ------------------------------------------------------------ the program: what a controller would want next

    def next_op(self) -> Spec | None:
        """The operation that is not ended, or the next of the program; the same for every leader that asks."""
        if self.specs:
            last = next(reversed(self.specs.values()))
            end = self.records.get(end_key(last.op))
            if end is None:
                return last
        else:
            last, end = None, None
        spec = self._after(last, end)
        if spec is not None:
            self.specs[spec.op] = spec
            self._homes[spec.op] = spec.op if spec.kind is Kind.RESTORE else self.incarnation
            if spec.kind is Kind.RESTORE:
                for rank in spec.ranks:
                    self._make_seat(spec.op, rank)
        return spec

    def _after(self, last: Spec | None, end: Record | None) -> Spec | None:
        outcome = Outcome(end.outcome) if end else None
        if outcome in (Outcome.RESTORED, Outcome.BROKEN):
            assert last is not None
            self.incarnation, self.finished, self.restores = last.op, set(last.finished), 0
        if outcome is Outcome.RELEASED:
            assert last is not None
            return self._restore_of(last.op) if self.program and self.program.pop(0) == "R" else None
        if outcome is Outcome.ABANDONED:
            assert last is not None
            return self._restore_of(last.checkpoint, last) if self.restores < 2 else None
        assert end is None or last is not None
        if end and last and outcome is Outcome.ABORTED and end.failures:
            self.finished |= {f.rank for f in end.failures if f.rank is not None and f.detail.get("status") == 0}
        ranks = tuple(rank for rank in range(self.size) if rank not in self.finished)
        trees = [self._seats[self.incarnation, rank].tree for rank in ranks]
        broken = outcome is Outcome.BROKEN or any(tree in (DEAD, NONE) for tree in trees)
        while self.program and self.program[0] == "R":
            self.program.pop(0)
        wanted = self.program.pop(0) if self.program else ""
        if not ranks:
            return None
        if broken or wanted == "B":
            return self._bury()
        if not wanted:
            return None
        kind = Kind.RELEASE if wanted == "S" else Kind.CONTINUE
        return Spec(
            f"op{len(self.specs) + 1}", len(self.specs) + 1, kind, ranks, tuple(sorted(self.finished)), timing=TIMING
        )

    def _restore_of(self, checkpoint: str, before: Spec | None = None) -> Spec:
        self.restores += 1
        commit = self.records[decision_key(checkpoint)]
        number = len(self.specs) + 1
        requires = (before.op,) if before else (checkpoint,)
        if self.records.get(release_key(checkpoint), commit).verdict is Verdict.CONTINUE and not before:
            requires = ()  # the incarnation that went on was buried
        return Spec(
            f"op{number}", number, Kind.RESTORE, commit.ranks, commit.finished, {}, TIMING, checkpoint, requires,
            self.rng.choice((1, 2, 3)),
        )  # fmt: skip

    def _bury(self) -> Spec | None:
        """The gang lost a rank: its containers are deleted, and it starts again from its last checkpoint."""
        for (home, _), seat in list(self._seats.items()):
            if home == self.incarnation:
                self.delete(seat)
        commits = [op for op in self.specs if self._committed(op)]
        return self._restore_of(commits[-1]) if commits and self.restores < 2 else None

    def _committed(self, op: str) -> bool:
        record = self.records.get(decision_key(op))
        return record is not None and record.verdict is Verdict.COMMIT

    def delete(self, seat: Seat) -> None:
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

    # ------------------------------------------------------------ network and store

    def send(self, sender: Any, to: str, message: Message) -> None:
        if self.chance(self.p_loss):
            return
        self.at(self._latency(), self._deliver, sender.seat, to, message)
        if self.chance(self.p_double):
            self.at(self._latency() * 5, self._deliver, sender.seat, to, message)

    def _latency(self) -> float:
        return 0.001 + self.delay * self.rng.random() ** 2

    def _deliver(self, origin: Seat | None, to: str, message: Message) -> None:
        if isinstance(message, Report):
            if origin is not None and self.cut_until.get(origin.name, 0.0) > self.time:
                return
            leader = self.addresses.get(to)
            if leader is not None:
                leader.hear(message)
            return
        op, _, rank = to.partition("#")
        seat = self.seat_of(op, int(rank))
        agent = self.agents[seat.name]
        if self.cut_until.get(seat.name, 0.0) > self.time or not agent.alive or seat.deleted:
            return
        if agent.stalled_until <= self.time:
            self._check_epoch(seat, agent, message)
        else:
            agent.post(message)

    def _check_epoch(self, seat: Seat, agent: Any, message: Any) -> None:
        """A member that has heard of a leader takes no orders from the ones before."""
        before = (agent.driver.machine.state, agent.driver.machine.begun)
        agent.post(message)
        machine = agent.driver.machine
        if message.epoch < seat.seen_epoch and agent.alive and (machine.state, machine.begun) != before:
            raise Violation("one leader", f"{seat.name} obeys epoch {message.epoch} after {seat.seen_epoch}")
        if agent.alive:
            seat.seen_epoch = max(seat.seen_epoch, message.epoch)

    def store(self, process: Any, key: str, record: Record | None) -> None:
        self.at(self._latency(), self._store_arrives, process, key, record)

    def store_reachable(self, process: Any) -> bool:
        return max(self.store_down_until, process.store_down_until) <= self.time and not self.chance(self.p_store)

    def _store_arrives(self, process: Any, key: str, record: Record | None) -> None:
        reachable = self.store_reachable(process)
        if reachable or (self.p_store and self.rng.random() < 0.3):
            if record is not None and (key not in self.records or self.plants.last_writer_wins):
                self.records[key] = record
                self.log("RECORD %s: %s by epoch %s", key, record.verdict, record.epoch)
                self.world.check_record(record)
                self._watch_record(record)
        answer: m.Event = m.RecordsDown(key)
        if reachable and not self.chance(self.p_store / 2):
            answer = m.RecordIs(key, self.records.get(key))
        self.at(self._latency(), self._store_answers, process, process.driver, answer)

    def _store_answers(self, process: Any, driver: Any, answer: m.Event) -> None:
        if process.driver is driver:
            process.post(answer)

    # ------------------------------------------------------------ deadlines

    def watch_freeze(self, seat: Seat, deadline: float) -> None:
        self.at(deadline + 10, self._check_freeze, seat, seat.freeze)

    def _check_freeze(self, seat: Seat, freeze: int) -> None:
        """Before its vote a tree is thawed within its deadline, or soon after somebody is there to do it."""
        if seat.tree != FROZEN or seat.freeze != freeze or seat.deleted or seat.fate == "voted":
            return
        guardian, agent = self.guardians.get(seat.name), self.agents[seat.name]
        if guardian is not None and guardian.alive and self.time - guardian.started_at > 10:
            raise Violation("thawed in time", f"{seat.name} is frozen past its deadline, its guardian lives")
        if agent.alive and self.time - max(agent.started_at, agent.stalled_until) > SLACK:
            raise Violation("thawed in time", f"{seat.name} is frozen past its deadline, its agent lives")
        self.at(SLACK, self._check_freeze, seat, freeze)

    def _watch_record(self, record: Record) -> None:
        if record.verdict in (Verdict.ABORT, Verdict.CONTINUE):
            for rank in self.specs[record.op].ranks:
                seat = self.seat_of(record.op, rank)
                if seat.tree == FROZEN:
                    self.at(SLACK, self._check_voted, seat, seat.freeze, self.time)

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

    # ------------------------------------------------------------ deaths and what follows them

    def agent_died(self, agent: Any) -> None:
        if not agent.seat.deleted:
            self.at(0.2 + 20 * self.rng.random() ** 2, self._restart_agent, agent.seat, agent)

    def _restart_agent(self, seat: Seat, dead: Any) -> None:
        if self.agents[seat.name] is dead:
            self.start_agent(seat)

    def guardian_died(self, guardian: Any) -> None:
        agent = self.agents[guardian.seat.name]
        if agent.alive and agent.guardian is guardian:
            self.at(0.05, agent.post, m.GuardianLost())

    def leader_died(self, leader: Any) -> None:
        self.at(0.5 + 20 * self.rng.random() ** 2, self.new_leader)

    def happen_late(self, seat: Seat, step: Step) -> None:
        if not self.world.happen_late(seat, step):
            self.at(1.0, self.happen_late, seat, step)

    def tree_exits(self, seat: Seat, status: int) -> None:
        if not seat.alive or seat.deleted or (seat.tree == FROZEN and status == 0):
            return
        self.log("%s exits with %s", seat.name, status)
        self.world.kill(seat, status)
        agent = self.agents[seat.name]
        if agent.alive:
            self.at(0.01, agent.post, m.TreeExited(status))

    # ------------------------------------------------------------ faults

    def _draw_faults(self) -> None:
        rng = self.rng
        kinds: tuple[tuple[int, Callable[[], None]], ...] = (
            (6, self._crash_leader),
            (4, self._second_leader),
            (3, self._stall_leader),
            (8, self._crash_agent),
            (3, self._stall_agent),
            (4, self._kill_guardian),
            (2, self._kill_both),
            (2, self._crash_node),
            (3, self._cut),
            (3, self._store_down),
            (3, self._jump),
            (2, self._exit),
            (4, self._withdraw),
            (1, self._delete_one),
            (6, self._light_fuse),
        )
        weights = [weight for weight, _ in kinds]
        span = 60 * self.size * len(self.program)
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))):
            self._faults[rng.randrange(1, span)] = rng.choices(kinds, weights)[0][1]
        self._calm_at = rng.randrange(span, 2 * span)

    def _calm(self) -> None:
        """Faults are over."""
        self.log("calm")
        self.p_loss = -1.0
        self.p_double = self.p_fail = self.p_hang = self.p_store = 0.0
        self.delay = min(self.delay, 0.1)
        self._faults.clear()

    def _some_seat(self) -> Seat | None:
        leader = self.leaders[-1]
        if leader.spec is None:
            return None
        return self.seat_of(leader.spec.op, self.rng.choice(leader.spec.ranks))

    def _crash_leader(self) -> None:
        leader = self.leaders[-1]
        if leader.alive and leader.spec is not None:
            self.log("fault: %s is killed", leader.name)
            leader.die()

    def _second_leader(self) -> None:
        if self.leaders[-1].spec is not None:
            self.log("fault: another leader")
            self.new_leader()

    def _stall_leader(self) -> None:
        leader = self.leaders[-1]
        if leader.alive and leader.spec is not None:
            self.log("fault: %s stalls", leader.name)
            leader.stalled_until = self.time + 60 * self.rng.random()
            self.at(15.0, self.new_leader)

    def _crash_agent(self) -> None:
        seat = self._some_seat()
        if seat and self.agents[seat.name].alive:
            self.log("fault: agent %s is killed", seat.name)
            self.agents[seat.name].die()

    def _stall_agent(self) -> None:
        seat = self._some_seat()
        if seat and self.agents[seat.name].alive:
            self.log("fault: agent %s stalls", seat.name)
            self.agents[seat.name].stalled_until = self.time + 90 * self.rng.random()

    def _kill_guardian(self) -> None:
        for guardian in self.guardians.values():
            if guardian.alive:
                self.log("fault: %s is killed", guardian.name)
                guardian.die()
                return

    def _kill_both(self) -> None:
        self._kill_guardian()
        self._crash_agent()

    def _crash_node(self) -> None:
        seat = self._some_seat()
        if not seat or seat.deleted or not seat.up:
            return
        self.log("fault: node of %s crashes", seat.name)
        seat.up = False
        agent = self.agents[seat.name]
        if agent.alive:
            agent.die()
        if seat.name in self.guardians:
            self.guardians[seat.name].alive = False
        self.world.crash(seat)
        self.at(1 + 60 * self.rng.random(), self._boot, seat)

    def _boot(self, seat: Seat) -> None:
        seat.up = True
        seat.base = self.time - 20 * self.rng.random()
        self.start_agent(seat)

    def _cut(self) -> None:
        seat = self._some_seat()
        if seat:
            self.log("fault: %s is cut off", seat.name)
            self.cut_until[seat.name] = self.time + 60 * self.rng.random() ** 2

    def _store_down(self) -> None:
        until = self.time + 100 * self.rng.random() ** 2
        seat = self._some_seat()
        if seat and self.rng.random() < 0.5:
            self.log("fault: no store for %s", seat.name)
            self.agents[seat.name].store_down_until = until
        else:
            self.log("fault: no store")
            self.store_down_until = until

    def _jump(self) -> None:
        seat = self._some_seat()
        if seat:
            self.log("fault: the clock of %s jumps", seat.name)
            seat.base -= 150 * self.rng.random() ** 2
            for process in (self.agents[seat.name], self.guardians.get(seat.name)):
                if process is not None and process.alive:
                    self.at(0.01, process.pump)

    def _exit(self) -> None:
        seat = self._some_seat()
        if seat:
            self.tree_exits(seat, self.rng.choice((0, 0, 1, 137)))

    def _withdraw(self) -> None:
        leader = self.leaders[-1]
        if leader.spec is not None:
            self.log("fault: %s is withdrawn", leader.spec.op)
            self.withdrawn.add(leader.spec.op)
            leader.post_about(leader.spec.op, m.Withdraw())

    def _delete_one(self) -> None:
        seat = self._some_seat()
        if seat:
            self.delete(seat)

    def _light_fuse(self) -> None:
        seat = self._some_seat()
        guardian = self.guardians.get(seat.name) if seat else None
        processes = [self.leaders[-1], *([self.agents[seat.name]] if seat else []), *([guardian] if guardian else [])]
        process = self.rng.choice(processes)
        if process.alive:
            self.log("fault: %s will die", process.name)
            process.fuse = self.rng.randrange(8)

    # ------------------------------------------------------------ the end

    def _check_end(self) -> None:
        for op in self.specs:
            if end_key(op) not in self.records:
                raise Violation("every run ends", f"{op} has not ended, and nothing will ever happen again")
        for leader in self.leaders:
            if leader.alive and leader.spec is not None:
                raise Violation("every run ends", f"{leader.name} waits for ever")
        for seat in self.world.seats:
            if seat.deleted:
                continue
            guardian = self.guardians.get(seat.name)
            if guardian is not None and guardian.alive:
                raise Violation("no guardian left", f"{guardian.name} watches for ever")
            op = next((op for op in reversed(self.specs) if self._homes[op] == seat.home), None)
            if op is None or self.records[end_key(op)].outcome != Outcome.BROKEN:
                self.world.check_free(seat, "all has ended")


def _brief(event: m.Event) -> str:
    if isinstance(event, Report):
        return f"Report(rank {event.rank}, {event.standing} {event.index}, failure={event.failure})"
    name = event.__class__.__name__
    if name in ("Order", "Decided"):
        record: Record | None = event.record  # type: ignore[union-attr]
        return f"{name}({event.op}, epoch {event.epoch}, index {getattr(event, 'index', '')}, " + (  # type: ignore[union-attr]
            f"{record.verdict if record else None})"
        )
    if isinstance(event, m.RecordIs):
        return f"RecordIs({event.key}, {event.record.verdict if event.record else None})"
    return name if name == "Booted" else str(event)
