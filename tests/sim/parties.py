"""The processes of a schedule: agents, guardians and leaders. Each runs the product's driver over simulated ports.

A process dies at any of its effects: `fuse` counts down to it. Its ports then know it no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.world import AWAKE, FROZEN, Seat, StepError

from stasis.core import guardian
from stasis.core import machine as m
from stasis.core.driver import CoordinatorDriver, Driver, GuardianDriver, MemberDriver, Reply
from stasis.core.gang import Coordinator, Results
from stasis.core.guardian import Guardian
from stasis.core.member import Member
from stasis.core.messages import Message, coordinator_address
from stasis.core.plan import Outcome, Spec
from stasis.core.records import Failure, Record
from stasis.core.steps import Step
from stasis.errors import CheckpointFailed

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@dataclass(frozen=True)
class Plants:
    """Bugs to plant: what is run instead of the product's machines and of a right store."""

    coordinator: type[Coordinator] = Coordinator
    member: type[Member] = Member
    guardian: type[Guardian] = Guardian
    last_writer_wins: bool = False


DEVICE_CALLS = (Step.LOCK_DEVICES, Step.SAVE_DEVICES)


class Died(BaseException):
    """The process is killed in the middle of what it does."""


class Process:
    """One operating system process: a driver, a clock, and the ways it can end."""

    driver: Driver

    def __init__(self, sim: Simulation, name: str, seat: Seat | None) -> None:
        self.sim = sim
        self.name = name
        self.seat = seat
        self.alive = True
        planted = sim.setting.fuse
        first = name not in sim.processes
        sim.processes.add(name)
        self.fuse = planted[1] if planted and planted[0] == name and first else -1  # effects until it dies
        self.stalled_until = 0.0
        self.store_down_until = 0.0
        self.started_at = sim.time
        self._next_wake: float | None = None

    def now(self) -> float:
        return self.sim.time - (self.seat.base if self.seat else 0.0)

    def burn(self) -> None:
        """Called before each effect."""
        if self.fuse >= 0:
            self.fuse -= 1
            if self.fuse < 0:
                raise Died

    def post(self, event: m.Event) -> None:
        """Deliver an event, after the stall if there is one."""
        if self.alive:
            self.driver.post(event)
            self.pump()

    def pump(self) -> None:
        sim = self.sim
        if self.stalled_until > sim.time:
            sim.at(self.stalled_until - sim.time, self.pump)
            return
        if not self.alive:
            return
        try:
            wake = self.driver.pump()
        except Died:
            sim.log("%s dies", self.name)
            self.die()
            return
        if wake is not None and self.alive:
            at = sim.time + max(0.0, wake - self.now()) + 1e-6  # no timer is early
            if self._next_wake is None or at < self._next_wake or self._next_wake < sim.time:
                self._next_wake = at
                sim.at(at - sim.time, self._wake)

    def _wake(self) -> None:
        self._next_wake = None
        self.pump()

    def die(self) -> None:
        self.alive = False
        self.sim.deaths.append(self.name)

    # Transport and Records

    def send(self, to: str, message: Message) -> None:
        self.burn()
        self.sim.send(self, to, message)

    def create(self, key: str, record: Record, reply: Reply) -> None:
        self.burn()
        self.sim.store(self, key, record)

    def read(self, key: str, reply: Reply) -> None:
        self.burn()
        self.sim.store(self, key, None)


class Agent(Process):
    """Ports of a member."""

    seat: Seat

    def __init__(self, sim: Simulation, seat: Seat) -> None:
        super().__init__(sim, f"agent {seat.name}", seat)
        self.guardian: GuardianProcess | None = sim.guardians.get(seat.name)
        self._deadline = 0.0  # that the guardian is to hold
        self._running: tuple[Step, int] | None = None
        self._hung = False
        self.member = sim.plants.member(seat.rank)
        self.driver = MemberDriver(
            self.member,
            boot=str(seat.boot),
            clock=self,
            transport=self,
            records=self,
            executor=self,
            guardian=self,
            journal=self,
            observe=sim.observe,
        )

    def die(self) -> None:
        super().die()
        self._give_up()
        self.seat.capturing = self.seat.captured = ""
        self.sim.agent_died(self)

    # Journal

    def load(self) -> dict[str, Any] | None:
        return self.seat.journal

    def save(self, journal: Mapping[str, Any]) -> None:
        self.burn()
        self.seat.journal = dict(journal)

    # Executor

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None:
        self.burn()
        sim, seat = self.sim, self.seat
        self._give_up()
        self._running = (step, token)
        sim.log("%s starts %s", self.name, step)
        sim.world.begin(seat, step, op, attempt)
        sim.trigger(step)
        self._hung = sim.world.device_call_hangs(seat, step) or sim.chance(sim.setting.hang)
        if self._hung:
            if sim.rng.random() < 0.7:
                sim.at(limit, self._end, token, step, op, attempt, args, "hang")
            return
        scale = 6.0 if step in (Step.STORE, Step.RESTORE) else 1.5 if step is Step.CAPTURE else 0.3
        failed = "fail" if sim.chance(sim.setting.fail) else ""
        sim.at(0.002 + scale * sim.rng.random() ** 3, self._end, token, step, op, attempt, args, failed)

    def _give_up(self) -> None:
        """Kill the child that carries the running step out; what a device call does, it still does."""
        if self._running is None:
            return
        step, token = self._running
        self._running = None
        seat = self.seat
        seat.capturing = ""
        if step in DEVICE_CALLS and self.sim.world.devices and seat.alive:
            seat.late.append(step)
            self.sim.at(self.sim.rng.random() * 8, self._happen_late, step)
        if step is Step.CAPTURE and self.sim.rng.random() < 0.3:
            self.sim.world.run(seat, "CRIU killed")
        if self.alive and self.sim.rng.random() < 0.2:
            self.sim.at(0.1, self.post, m.StepDone(token, {"late": True}))

    def _happen_late(self, step: Step) -> None:
        if not self.sim.world.happen_late(self.seat, step):
            self.sim.at(1.0, self._happen_late, step)

    def _end(self, token: int, step: Step, op: str, attempt: int, args: Mapping[str, Any], how: str) -> None:
        if not self.alive or self._running is None or self._running[1] != token:
            return
        if how == "hang":
            self._give_up()
            failure = Failure("DeadlineExceeded", "the step hangs", "", self.seat.rank, step)
            self._note_failed(op, attempt, step)
            self.post(m.StepFailed(token, failure))
            return
        self._running = None
        try:
            if how:
                self.seat.capturing = ""
                if step is Step.CAPTURE and self.sim.rng.random() < 0.5:
                    self.sim.world.run(self.seat, "CRIU failed")
                if step is Step.RESTORE and self.sim.rng.random() < 0.5:
                    self.sim.world.finish(self.seat, step, op, attempt, args)  # restored, and then something fails
                raise StepError(Failure("CheckpointFailed", "the step failed", "", self.seat.rank, step))
            result = self.sim.world.finish(self.seat, step, op, attempt, args)
        except StepError as error:
            self.sim.log("%s failed %s: %s", self.name, step, error.failure)
            self._note_failed(op, attempt, step)
            self.post(m.StepFailed(token, error.failure))
        else:
            self.sim.log("%s did %s %s", self.name, step, result)
            self.post(m.StepDone(token, result))

    def _note_failed(self, op: str, attempt: int, step: Step) -> None:
        """A restored rank that fails a step for good does not keep the others from going on."""
        if step in AWAKE.values():
            self.seat.through.add((op, attempt, step))

    # GuardianPort

    def arm(self, op: str, deadline: float, poll: float, reply: Reply) -> None:
        self.burn()
        self.seat.fates.setdefault(op, "")
        self.seat.guarded_op = op
        self._deadline = deadline
        if self._guards(op):
            self.sim.at(0.01, self._arm, op, poll)
        elif not self.sim.chance(self.sim.setting.hang):
            self.sim.at(0.02 + self.sim.rng.random() * 0.2, self._arm, op, poll)

    def _guards(self, op: str) -> bool:
        return self.guardian is not None and self.guardian.alive and self.guardian.op == op

    def _arm(self, op: str, poll: float) -> None:
        """The deadline that was asked for last counts, in whatever order the calls are carried out."""
        sim, deadline = self.sim, self._deadline
        if not self.alive or op not in self.seat.fates:
            return
        if not self._guards(op):
            if sim.chance(sim.setting.fail):
                self.post(m.GuardianLost())
                return
            self.guardian = GuardianProcess(sim, self.seat, op, deadline, poll)
            sim.guardians[self.seat.name] = self.guardian
            self.post(m.GuardianUp(deadline))
            self.guardian.pump()
            return
        assert self.guardian is not None
        if self.guardian.stalled_until > sim.time:
            sim.at(self.guardian.stalled_until - sim.time, self._arm, op, poll)
            return
        if self.guardian.machine.deadline != deadline:
            self.guardian.post(m.Rearmed(deadline))
        if not self.guardian.alive:
            self._arm(op, poll)
        elif self.guardian.machine.deadline == deadline:
            self.post(m.GuardianUp(deadline))
        else:
            self.post(m.GuardianLost())

    def claim(self, value: str) -> str:
        self.burn()
        return self.seat.claim(self.seat.guarded_op, value)

    def fate(self) -> str | None:
        return self.seat.fates.get(self.seat.guarded_op)

    def disarm(self) -> None:
        self.burn()
        self.seat.fates.pop(self.seat.guarded_op, None)
        if self.guardian is not None:
            self.guardian.alive = False


class GuardianProcess(Process):
    """Ports of a guardian."""

    seat: Seat

    def __init__(self, sim: Simulation, seat: Seat, op: str, deadline: float, poll: float) -> None:
        super().__init__(sim, f"guardian {seat.name}", seat)
        self.op = op
        self.killed = False
        self._drive(deadline, poll)

    def _drive(self, deadline: float, poll: float) -> None:
        self.machine = self.sim.plants.guardian(self.op, deadline, poll)
        self.driver = GuardianDriver(
            self.machine, clock=self, records=self, fate=self, tree=self, observe=self.sim.observe
        )

    def orphaned(self, agent: Agent) -> None:
        """Its agent is gone: before the vote nothing is worth waiting for, what was captured was the agent's."""
        if self.alive and self.sim.agents[self.seat.name] is agent and not self.seat.voted:
            self._drive(self.now(), self.machine.poll)
            self.pump()

    def pump(self) -> None:
        super().pump()
        if self.machine.state is guardian.State.GONE:
            self.alive = False

    def die(self) -> None:
        super().die()
        self.killed = True
        self.sim.guardian_died(self)

    def claim(self, value: str) -> str:
        self.burn()
        return self.seat.claim(self.op, value)

    def fate(self) -> str | None:
        self.burn()
        return self.seat.fates.get(self.op)

    def rescue(self) -> bool:
        self.burn()
        self.sim.log("%s rescues", self.name)
        self.sim.world.unlock(self.seat)
        if self.sim.chance(self.sim.setting.fail):
            return False
        self.sim.world.run(self.seat, "guardian")
        return self.seat.tree != FROZEN


class Leader(Process):
    """A controller that leads one operation of the program after the other."""

    def __init__(self, sim: Simulation, epoch: int) -> None:
        super().__init__(sim, f"leader {epoch}", None)
        self.epoch = epoch
        self.spec: Spec | None = None

    def lead(self) -> None:
        """Take the next operation, or the one that is not ended, if this process lives."""
        sim = self.sim
        if not self.alive:
            return
        if self.stalled_until > sim.time:
            sim.at(self.stalled_until - sim.time, self.lead)
            return
        self.spec = spec = sim.program.next_op()
        if spec is None:
            sim.log("%s: the program is through", self.name)
            return
        sim.log("%s leads %s %s of ranks %s", self.name, spec.op, spec.kind, spec.ranks)
        machine = sim.plants.coordinator(spec, self.epoch, self._hook)
        self.driver = CoordinatorDriver(
            machine, clock=self, transport=self, records=self, notify=self.notify, observe=sim.observe
        )
        sim.posts[coordinator_address(spec.op, self.epoch)] = self
        if spec.op in sim.withdrawn:
            self.driver.post(m.Withdraw())
        for rank in spec.ranks:
            if sim.seat_of(spec.op, rank).deleted:
                self.driver.post(m.Lost(rank))
        self._next_wake = None
        self.pump()

    def _hook(self, step: Step, results: Results) -> Mapping[int, Mapping[str, Any]]:
        """A caller that compares what all ranks captured, and tells each of them what came of it."""
        if step == self.sim.setting.refuse and not self.sim.calmed:
            raise CheckpointFailed("the ranks contradict each other")
        return {rank: {"peers": sorted(results)} for rank in results} if step is Step.CAPTURE else {}

    def pump(self) -> None:
        if self.spec is not None:
            super().pump()

    def post_about(self, op: str, event: m.Event) -> None:
        if self.spec is not None and self.spec.op == op:
            self.post(event)

    def notify(self, notice: m.Notice) -> None:
        self.burn()
        self.sim.log("%s: %s", self.name, notice)
        if isinstance(notice, m.Ended):
            self.spec = None
            if notice.outcome is Outcome.SUPERSEDED:
                self.alive = False
            else:
                self.sim.at(0.5 + self.sim.rng.random() * 2, self.lead)

    def die(self) -> None:
        super().die()
        self.sim.leader_died()
