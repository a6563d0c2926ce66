"""The faults of a schedule: each befalls whoever is concerned with the operation that is going on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.world import FROZEN, Seat

from stasis.core import machine as m

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Faults:
    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.rng = sim.rng

    def strike(self, name: str) -> None:
        """Let the fault of this name happen, where there is somebody whom it can befall."""
        if self.sim.calmed:
            return
        self.sim.log("fault: %s", name)
        getattr(self, "_" + name.replace("-", "_"))()

    # Whom they befall.

    def _leader(self) -> Any:
        leader = self.sim.leaders[-1]
        return leader if leader.alive and leader.spec is not None else None

    def _seat(self) -> Seat | None:
        spec = self.sim.leaders[-1].spec
        return None if spec is None else self.sim.seat_of(spec.op, self.rng.choice(spec.ranks))

    def _agent(self) -> Any:
        seat = self._seat()
        agent = self.sim.agents[seat.name] if seat else None
        return agent if agent and agent.alive else None

    def _guardian(self) -> Any:
        return next((guardian for guardian in self.sim.guardians.values() if guardian.alive), None)

    # Processes.

    def _crash_leader(self) -> None:
        if leader := self._leader():
            leader.die()

    def _second_leader(self) -> None:
        if self._leader():
            self.sim.new_leader()

    def _stall_leader(self) -> None:
        if leader := self._leader():
            leader.stalled_until = self.sim.time + 60 * self.rng.random()
            self.sim.at(15.0, self.sim.new_leader)

    def _crash_agent(self) -> None:
        if agent := self._agent():
            agent.die()

    def _stall_agent(self) -> None:
        if agent := self._agent():
            agent.stalled_until = self.sim.time + 90 * self.rng.random()

    def _kill_guardian(self) -> None:
        if guardian := self._guardian():
            guardian.die()

    def _kill_both(self) -> None:
        self._kill_guardian()
        self._crash_agent()

    def _fuse(self) -> None:
        """One of them dies within its next few effects."""
        process = self.rng.choice([p for p in (self._leader(), self._agent(), self._guardian()) if p] or [None])
        if process:
            process.fuse = self.rng.randrange(8)

    # Nodes, networks, store, clocks.

    def _crash_node(self) -> None:
        seat = self._seat()
        if not seat or seat.deleted or not seat.up:
            return
        seat.up = False
        for process in (self.sim.agents[seat.name], self.sim.guardians.get(seat.name)):
            if process and process.alive:
                process.die()
        self.sim.world.crash(seat)
        self.sim.at(1 + 60 * self.rng.random(), self._boot, seat)

    def _boot(self, seat: Seat) -> None:
        seat.up = True
        seat.base = self.sim.time - 20 * self.rng.random()
        self.sim.start_agent(seat)

    def _cut(self) -> None:
        if seat := self._seat():
            seat.cut_until = self.sim.time + 60 * self.rng.random() ** 2

    def _store_down(self) -> None:
        until = self.sim.time + 100 * self.rng.random() ** 2
        agent = self._agent()
        if agent and self.rng.random() < 0.5:
            agent.store_down_until = until
        else:
            self.sim.store_down_until = until

    def _jump(self) -> None:
        """CLOCK_BOOTTIME goes on while a machine sleeps."""
        if seat := self._seat():
            seat.base -= 150 * self.rng.random() ** 2
            for process in (self.sim.agents[seat.name], self.sim.guardians.get(seat.name)):
                if process:
                    self.sim.at(self.rng.random(), process.pump)

    # The gang itself, and its owner.

    def _exit(self) -> None:
        seat = self._seat()
        status = self.rng.choice((0, 0, 1, 137))
        if not seat or not seat.alive or seat.deleted or (seat.tree == FROZEN and status != 137):
            return
        self.sim.world.kill(seat, status)
        agent = self.sim.agents[seat.name]
        self.sim.at(0.01, agent.post, m.TreeExited(status))

    def _withdraw(self) -> None:
        if leader := self._leader():
            self.sim.withdrawn.add(leader.spec.op)
            leader.post_about(leader.spec.op, m.Withdraw())

    def _delete(self) -> None:
        if seat := self._seat():
            self.sim.delete(seat)
