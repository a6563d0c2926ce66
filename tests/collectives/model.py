"""A model of a gang at its gates: random programs and schedules, late messages; rule and cut are the shipped ones."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stasis_trainer.cut import Cut
from stasis_trainer.gate import may_pass
from stasis_trainer.messages import State

Rule = Callable[[Mapping[str, int], Mapping[str, int], str], bool]


@dataclass(frozen=True)
class Step:
    """An operation's beginning, or (`wait`) the wait for its end, of the n-th operation of a channel."""

    channel: str
    number: int
    wait: bool


def owes_anywhere(counts: Mapping[str, int], targets: Mapping[str, int], channel: str) -> bool:
    return may_pass(counts, targets)


def owes_here(counts: Mapping[str, int], targets: Mapping[str, int], channel: str) -> bool:
    """What one would do first."""
    return counts.get(channel, 0) < targets.get(channel, 0)


@dataclass
class Rank:
    program: list[Step]
    at: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    armed: bool = False
    targets: dict[str, int] = field(default_factory=dict)


@dataclass
class Gang:
    members: dict[str, list[int]]
    ranks: list[Rank]
    rng: random.Random
    rule: Rule

    @classmethod
    def of(cls, seed: int, rule: Rule) -> Gang:
        """Programs without deadlocks: each rank's part of one sequence of operations of all of them."""
        rng = random.Random(seed)
        size = rng.randint(2, 5)
        members = {}
        for number in range(rng.randint(1, 5)):
            members[f"group {number}"] = sorted(rng.sample(range(size), rng.randint(2, size)))
        programs: list[list[Step]] = [[] for _ in range(size)]
        begun: dict[str, int] = {}
        later: list[list[Step]] = [[] for _ in range(size)]
        for _ in range(rng.randint(5, 40)):
            channel = rng.choice(list(members))
            begun[channel] = begun.get(channel, 0) + 1
            for rank in members[channel]:
                programs[rank].append(Step(channel, begun[channel], False))
                wait = Step(channel, begun[channel], True)
                if rng.random() < 0.6:
                    programs[rank].append(wait)
                elif rng.random() < 0.7:  # the rest is never waited for
                    later[rank].append(wait)
                while later[rank] and rng.random() < 0.3:
                    programs[rank].append(later[rank].pop())
        return cls(members, [Rank(program) for program in programs], rng, rule)

    def complete(self, step: Step) -> bool:
        return all(self.ranks[rank].counts.get(step.channel, 0) >= step.number for rank in self.members[step.channel])

    def can_step(self, rank: Rank) -> bool:
        if rank.at == len(rank.program):
            return False
        step = rank.program[rank.at]
        if step.wait:
            return self.complete(step)
        return not rank.armed or self.rule(rank.counts, rank.targets, step.channel)

    def step(self, rank: Rank) -> None:
        step = rank.program[rank.at]
        if not step.wait:
            rank.counts[step.channel] = rank.counts.get(step.channel, 0) + 1
        rank.at += 1

    def running(self, rank: Rank) -> list[str]:
        begun = [step for step in rank.program[: rank.at] if not step.wait]
        return [step.channel for step in begun if not self.complete(step)]

    def state(self, index: int) -> State:
        rank = self.ranks[index]
        members = {channel: self.members[channel] for channel in rank.counts}
        return State(index, dict(rank.counts), members, self.running(rank))

    def run_to_trigger(self) -> None:
        for _ in range(self.rng.randint(0, sum(len(rank.program) for rank in self.ranks))):
            able = [rank for rank in self.ranks if self.can_step(rank)]
            if able:
                self.step(self.rng.choice(able))

    def checkpoint(self) -> bool:
        """Whether a cut closes: False where nobody can move any more and no message is under way."""
        cut: Cut[int] = Cut(range(len(self.ranks)))
        to_ranks: list[deque[dict[str, int] | None]] = [deque([None]) for _ in self.ranks]
        to_cut: list[deque[State]] = [deque() for _ in self.ranks]
        while not cut.closed:
            moves: list[Callable[[], None]] = []
            for index, rank in enumerate(self.ranks):
                if self.can_step(rank):
                    moves.append(lambda index=index: self._move(index, to_cut))  # type: ignore[misc]
                if to_ranks[index]:
                    moves.append(lambda index=index: self._deliver(index, to_ranks, to_cut))  # type: ignore[misc]
                if to_cut[index]:
                    moves.append(lambda index=index: cut.observe(index, to_cut[index].popleft()))  # type: ignore[misc]
            if not moves:
                return False
            self.rng.choice(moves)()
            for index, targets in cut.to_send().items():
                to_ranks[index].append(targets)
        self.check_cut()
        return True

    def check_cut(self) -> None:
        """Consistent: nobody is within an operation, and nobody can leave."""
        for index, rank in enumerate(self.ranks):
            assert not self.running(rank), f"rank {index} is within an operation"
            for channel, members in self.members.items():
                counts = {self.ranks[member].counts.get(channel, 0) for member in members}
                assert len(counts) == 1, f"{channel} is cut at {counts}"

    def finish(self) -> bool:
        """Whether the programs end once the gates are open again."""
        for rank in self.ranks:
            rank.armed, rank.targets = False, {}
        while able := [rank for rank in self.ranks if self.can_step(rank)]:
            self.step(self.rng.choice(able))
        return all(rank.at == len(rank.program) for rank in self.ranks)

    def _deliver(self, index: int, to_ranks: list[deque[dict[str, int] | None]], to_cut: list[deque[State]]) -> None:
        message = to_ranks[index].popleft()
        self.ranks[index].armed = True
        if message is not None:
            self.ranks[index].targets = message
        self._report(to_cut)

    def _move(self, index: int, to_cut: list[deque[State]]) -> None:
        self.step(self.ranks[index])
        self._report(to_cut)

    def _report(self, to_cut: list[deque[State]]) -> None:
        """Each armed rank says how it stands: an operation may have ended in it by what another did."""
        for index, rank in enumerate(self.ranks):
            if rank.armed and (not to_cut[index] or to_cut[index][-1] != self.state(index)):
                to_cut[index].append(self.state(index))
