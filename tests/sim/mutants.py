"""Planted bugs: each invariant must catch one, else it checks nothing.

Every plant is the product's machine with one thing done wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.sim.parties import Plants
from tests.sim.setting import Setting, timing

from stasis.core import machine as m
from stasis.core.gang import Coordinator, State
from stasis.core.guardian import Guardian
from stasis.core.member import Member
from stasis.core.messages import Decided, Order, Report, Standing
from stasis.core.plan import PLANS, VOTES, Kind
from stasis.core.records import Failure, Record, Verdict
from stasis.core.steps import Step


class NoBarrier(Coordinator):
    """Goes on as soon as one rank is through a stage."""

    def _step_report(self, report: Report) -> None:
        if report.standing is Standing.DONE and report.index == self.index < VOTES[self.spec.kind]:
            self._pending = {report.rank} & self._pending
        super()._step_report(report)


class CommitsAnyway(Coordinator):
    """Commits when a rank fails to store."""

    def _fail(self, failure: Failure) -> None:
        spec = self.spec
        if not self._restore and self.index == VOTES[spec.kind]:
            manifests = {rank: f"{spec.op}/{rank}" for rank in spec.ranks}
            self._propose(Record(Verdict.COMMIT, spec.op, self.epoch, 1, spec.ranks, spec.finished, manifests))
        else:
            super()._fail(failure)


class ForgetsFinished(Coordinator):
    """Does not record which ranks had finished before."""

    def _success(self) -> Record:
        record = super()._success()
        return Record(record.verdict, record.op, record.epoch, record.attempt, record.ranks, (), dict(record.manifests))


class NeverRepeats(Coordinator):
    """Says everything once."""

    def _step_tick(self, event: m.Tick) -> None:
        self.wake_at = None

    def _settle_tick(self, event: m.Tick) -> None:
        self.wake_at = None


class GivesUpTheStore(Coordinator):
    """Does not ask the store again."""

    def _write_later(self, event: m.RecordsDown) -> None:
        pass


class DoesNotSettle(Coordinator):
    """Ends without waiting for the ranks."""

    def _settle(self) -> None:
        super()._settle()
        self._pending.clear()
        if self.state is State.SETTLING:
            self._settled()


class ThawsUnrecorded(Coordinator):
    """Lets restored ranks run without writing that it does."""

    def _propose(self, record: Record) -> None:
        if record.verdict is Verdict.RESTORED:
            self._told = record
            self._resume(VOTES[self.spec.kind] + 1)
        else:
            super()._propose(record)


class MixesCheckpoints(Coordinator):
    """Takes the first checkpoint of rank 0 for every restore."""

    def _take_manifests(self, commit: Record) -> None:
        super()._take_manifests(commit)
        self._extra[self.spec.ranks[0]]["manifest"] = f"op1/{self.spec.ranks[0]}"


class UnlocksEarly(Member):
    """Unlocks its network when it is captured itself."""

    def _step_done(self, event: m.StepDone) -> None:
        captured = event.token == self._token and PLANS[self.kind][self.begun].step is Step.CAPTURE
        super()._step_done(event)
        if captured and self.kind is not Kind.RESTORE:
            self._start(Step.UNLOCK_NETWORK, {})


class ReleasesOnCommit(Member):
    """Kills its tree when it reads Commit."""

    def _obey(self, record: Record) -> None:
        if record.verdict is Verdict.COMMIT:
            self._finish((Step.RELEASE,))
        else:
            super()._obey(record)


class TearsDownAlone(Member):
    """After its vote, at its deadline, it gives a restore up without a record."""

    def _watch(self, event: m.Tick) -> None:
        if self.kind is Kind.RESTORE:
            self._give_up(Failure("DeadlineExceeded", "planted"))
        else:
            super()._watch(event)


class ThawsAlone(Member):
    """After its vote it gives a checkpoint up without a record."""

    def _watch(self, event: m.Tick) -> None:
        if self.kind is Kind.RELEASE:
            self._give_up(Failure("DeadlineExceeded", "planted"))
        else:
            super()._watch(event)


class VotesLate(Member):
    """Votes although its guardian has thawed the tree."""

    def _claimed(self, event: m.Fate) -> None:
        self._voted()


class Waits(Member):
    """Has no deadline."""

    def _too_late(self, event: m.Tick) -> None:
        self.wake_at = None


class Sleeps(Guardian):
    """Does nothing at its deadline."""

    def _tick(self, event: m.Tick) -> None:
        self.wake_at = None if self.now >= self.deadline else self.now + self.poll


class Overrides(Guardian):
    """Heeds its deadline also after the vote."""

    def _fate(self, event: m.Fate) -> None:
        if self.now >= self.deadline:
            self._rescue()


class DoesNotRead(Guardian):
    """Does not look at the records after the vote."""

    def _record(self, event: m.RecordIs) -> None:
        pass


class Deaf(Member):
    """Having voted, it heeds no Abort."""

    def _obey(self, record: Record) -> None:
        if record.verdict is not Verdict.ABORT:
            super()._obey(record)


class Unguarded(Member):
    """Freezes without a guardian."""

    def _arm(self) -> None:
        self._guarded(m.GuardianUp(self.deadline))


class GuardedByHabit(Member):
    """Freezes while its guardian still holds the deadline of the preparation."""

    def _arm(self) -> None:
        if self._armed:
            self._guarded(m.GuardianUp(self.deadline))
        else:
            super()._arm()


class Disloyal(Member):
    """Obeys leaders that were deposed."""

    def _led(self, message: Order | Decided) -> bool:
        self.epoch = max(self.epoch, message.epoch)
        return True


class RestoresOver(Member):
    """Begins a new attempt in the ruins of the one before."""

    def _mine(self, message: Order | Decided) -> bool:
        if message.attempt > self.attempt and isinstance(message, Order) and message.op == self.op:
            self._accept(message)
            self._start_stage(message)
            return False
        return super()._mine(message)


class DoesNotTearDown(Coordinator):
    """Begins a new attempt before the ranks have torn the one before down."""

    def _settle(self) -> None:
        super()._settle()
        if self._restore and self.state is State.SETTLING:
            self._pending.clear()
            self._settled()


def forgetting(step: Step) -> type[Member]:
    class Forgets(Member):
        """Leaves one thing undone."""

        def _finish(self, todo: tuple[Step, ...]) -> None:
            super()._finish(tuple(one for one in todo if one is not step))

    return Forgets


class Trusting(Member):
    """Takes a device's word that all is undone."""

    def _finish_done(self, event: m.StepDone) -> None:
        super()._finish_done(m.StepDone(event.token, {}))


class Mutant(NamedTuple):
    name: str
    plants: Plants
    caught_by: tuple[str, ...]  # any of these invariants
    setting: Callable[[], Setting] | None = None  # where a drawn one shows it too rarely


def _mutant(
    caught_by: str | tuple[str, ...], name: str = "", setting: Callable[[], Setting] | None = None, **plants: Any
) -> Mutant:
    names = (caught_by,) if isinstance(caught_by, str) else caught_by
    title = name or "+".join(getattr(plant, "__name__", key) for key, plant in plants.items())
    return Mutant(title, Plants(**plants), names, setting)


def _stalled_store() -> Setting:
    """An agent that stalls while it stores, for longer than its guardian waits."""
    faults: dict[str, list[str]] = {Step.STORE: ["stall-agent"]}
    return Setting(program="S", timing=timing(frozen=30, step=80), triggers=faults, calm=100_000)


MUTANTS = (
    _mutant("barrier", coordinator=NoBarrier),
    _mutant("complete commit", coordinator=CommitsAnyway),
    _mutant("complete commit", coordinator=ForgetsFinished),
    _mutant("every run ends", coordinator=NeverRepeats),
    _mutant("every run ends", coordinator=GivesUpTheStore),
    _mutant("settled", coordinator=DoesNotSettle),
    _mutant("one place", coordinator=ThawsUnrecorded),
    _mutant("one checkpoint", coordinator=MixesCheckpoints),
    _mutant("consistent cut", member=UnlocksEarly),
    _mutant("no early kill", member=ReleasesOnCommit),
    _mutant("no early kill", member=TearsDownAlone),
    _mutant("bound by its vote", member=ThawsAlone),
    _mutant("bound by its vote", guardian=Overrides),
    _mutant("frozen until released", setting=_stalled_store, member=VotesLate),
    _mutant("thawed in time", member=Waits, guardian=Sleeps),
    _mutant("thawed as recorded", member=Deaf, guardian=DoesNotRead),
    _mutant("guarded", member=Unguarded),
    _mutant("guarded", member=GuardedByHabit),
    _mutant("one leader", member=Disloyal),
    _mutant("clean placeholder", coordinator=DoesNotTearDown, member=RestoresOver),
    _mutant("no network lock", "forgets the network", member=forgetting(Step.UNLOCK_NETWORK)),
    _mutant("no frozen tree", "forgets the thaw", member=forgetting(Step.THAW)),
    _mutant("no device lock", "forgets the devices", member=forgetting(Step.UNLOCK_DEVICES)),
    _mutant("no device lock", "forgets to rebuild", member=forgetting(Step.REBUILD)),
    _mutant("no device lock", member=Trusting),
    _mutant("no reservation", "forgets the reservation", member=forgetting(Step.CONTINUE)),
    _mutant(("no early kill", "bound by its vote", "one place", "settled"), last_writer_wins=True),
)
