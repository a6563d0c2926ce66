"""What the coordinator of a gang works out from its trainers' states: what to send, when to commit, who owes.

Pure: the caller moves the messages. Counts only grow, so states need not be of one instant: one that is late only makes
a rank park longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stasis_trainer import channels
from stasis_trainer.channels import Counts
from stasis_trainer.messages import State

Process = TypeVar("Process", bound=Hashable)


@dataclass(frozen=True, order=True)
class Debt:
    """A rank that has not begun what a peer has, when the time was up."""

    rank: int
    channel: str
    begun: int
    target: int

    def __str__(self) -> str:
        return f"rank {self.rank} owes {channels.describe(self.channel, self.begun + 1)}"


class Cut(Generic[Process]):
    """Of the processes armed for one checkpoint: ranks, and helpers such as torchrun's agent, which have no rank."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._states: dict[Process, State | None] = dict.fromkeys(processes)
        self._sent: dict[Process, Counts] = {}

    def observe(self, process: Process, state: State) -> None:
        self._states[process] = state

    def to_send(self) -> dict[Process, Counts]:
        """Targets by process, for those whose targets have changed; none before every process was heard."""
        if not self._complete:
            return {}
        targets, members = self._targets(), self._members()
        # Who has no rank yet may be the one that others wait for; torchrun's agent never gets one.
        starting = any(debt.channel == channels.INIT for debt in self.debts())
        changed = {}
        for process, state in self._known.items():
            mine = {
                channel: target
                for channel, target in targets.items()
                if state.rank in members[channel] or (channel == channels.INIT and state.rank is None and starting)
            }
            if mine != self._sent.get(process, {}):
                changed[process] = self._sent[process] = mine
        return changed

    @property
    def closed(self) -> bool:
        """All members of every channel have begun as much, all of it has ended, and nothing is being called."""
        return self._complete and not self.debts() and not self.busy()

    def debts(self) -> list[Debt]:
        targets, members = self._targets(), self._members()
        found = []
        for channel, target in targets.items():
            for rank in members[channel]:
                begun = max((s.counts.get(channel, 0) for s in self._known.values() if s.rank == rank), default=0)
                if begun < target:
                    found.append(Debt(rank, channel, begun, target))
        return sorted(found)

    def busy(self) -> list[str]:
        """What was begun and has not ended, in words."""
        found = []
        for state in self._known.values():
            who = "a process without a rank" if state.rank is None else f"rank {state.rank}"
            found += [f"{who} is within an operation of {channel}" for channel in state.running]
            if state.brief_calls:
                found.append(f"{who} is within {state.brief_calls} calls of stores or groups")
        return sorted(found)

    def refused(self) -> list[str]:
        return sorted(
            f"rank {state.rank}: {reason}" if state.rank is not None else reason
            for state in self._known.values()
            for reason in state.refused
        )

    @property
    def _known(self) -> dict[Process, State]:
        return {process: state for process, state in self._states.items() if state}

    @property
    def _complete(self) -> bool:
        return len(self._known) == len(self._states)

    def _targets(self) -> Counts:
        targets: Counts = {}
        for state in self._known.values():
            for channel, count in state.counts.items():
                targets[channel] = max(count, targets.get(channel, 0))
        return targets

    def _members(self) -> dict[str, list[int]]:
        return {channel: ranks for state in self._known.values() for channel, ranks in state.members.items()}
