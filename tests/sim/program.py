"""What a controller would want of the gang, operation after operation; the same for every leader that asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.world import Seat

from stasis.core.plan import Kind, Outcome, Spec
from stasis.core.records import Record, Verdict, decision_key, end_key

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

PROGRAMS = ("S", "SR", "SR", "C", "CS", "CSR", "CB", "SRC", "SRSR", "CSRCSR")
"""S: suspend; R: resume; C: checkpoint and go on; B: the gang is lost and starts again from its last checkpoint."""


class Program:
    """The operations so far, and where the gang is."""

    def __init__(self, sim: Simulation, wanted: str) -> None:
        self.sim = sim
        self.specs: dict[str, Spec] = {}
        self.wanted = list(wanted)
        self.incarnation = "start"  # the operation that made the seats in which the gang runs
        self.finished: set[int] = set()
        self._homes: dict[str, str] = {}
        self._restores = 0

    def home(self, op: str) -> str:
        """Whose seats the operation acts on."""
        return self._homes[op]

    def next_op(self) -> Spec | None:
        """The operation that is not ended, or the next one, or None where nothing is left to want."""
        last = next(reversed(self.specs.values()), None)
        end = self.sim.records.get(end_key(last.op)) if last else None
        if last and end is None:
            return last
        spec = self._after(last, end) if last and end else self._checkpoint()
        if spec is not None:
            self.specs[spec.op] = spec
            self._homes[spec.op] = spec.op if spec.kind is Kind.RESTORE else self.incarnation
            if spec.kind is Kind.RESTORE:
                for rank in spec.ranks:
                    self.sim.make_seat(spec.op, rank)
        return spec

    def _after(self, last: Spec, end: Record) -> Spec | None:
        match Outcome(end.outcome):
            case Outcome.RELEASED:
                return self._restore(last.op, last.op) if self.wanted and self.wanted.pop(0) == "R" else None
            case Outcome.ABANDONED:
                return self._restore(last.checkpoint, last.op)
            case Outcome.RESTORED | Outcome.BROKEN:
                self.incarnation, self.finished, self._restores = last.op, set(last.finished), 0
                if end.outcome == Outcome.BROKEN:
                    return self._bury()
            case Outcome.ABORTED:
                self.finished |= {f.rank for f in end.failures if f.rank is not None and f.detail.get("status") == 0}
        return self._checkpoint()

    def _checkpoint(self) -> Spec | None:
        ranks = tuple(rank for rank in range(self.sim.size) if rank not in self.finished)
        while self.wanted and self.wanted[0] == "R":  # it runs
            self.wanted.pop(0)
        wanted = self.wanted.pop(0) if self.wanted else ""
        if not ranks:
            return None
        if wanted == "B" or not all(self.sim.seats[self.incarnation, rank].alive for rank in ranks):
            return self._bury()
        if not wanted:
            return None
        kind = Kind.RELEASE if wanted == "S" else Kind.CONTINUE
        number = len(self.specs) + 1
        return Spec(f"op{number}", number, kind, ranks, tuple(sorted(self.finished)), {}, self.sim.setting.timing)

    def _bury(self) -> Spec | None:
        """The gang lost a rank: its containers are deleted, and it starts again from its last checkpoint."""
        for seat in self._graves():
            self.sim.delete(seat)
        commits = [op for op in self.specs if self._committed(op)]
        return self._restore(commits[-1], "") if commits else None

    def _graves(self) -> list[Seat]:
        return [seat for (home, _), seat in self.sim.seats.items() if home == self.incarnation]

    def _committed(self, op: str) -> bool:
        record = self.sim.records.get(decision_key(op))
        return record is not None and record.verdict is Verdict.COMMIT

    def _restore(self, checkpoint: str, before: str) -> Spec | None:
        """`before`: the operation of whose trees none may be left; none where they were buried."""
        self._restores += 1
        if self._restores > 2:
            return None
        commit = self.sim.records[decision_key(checkpoint)]
        number = len(self.specs) + 1
        return Spec(
            f"op{number}",
            number,
            Kind.RESTORE,
            commit.ranks,
            commit.finished,
            timing=self.sim.setting.timing,
            checkpoint=checkpoint,
            requires=(before,) if before else (),
            attempts=self.sim.rng.choice((1, 2, 3)),
        )
