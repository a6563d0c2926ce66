"""Operations of the gang protocol as its caller sees them: real machines and drivers over the simplest ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stasis.core import machine as m
from stasis.core.driver import CoordinatorDriver, Driver, MemberDriver, Reply
from stasis.core.gang import Coordinator, Hook, no_hook
from stasis.core.guardian import Duty, duty
from stasis.core.member import Member
from stasis.core.messages import Message, coordinator_address, member_address
from stasis.core.plan import Kind, Outcome, Spec, Timing
from stasis.core.records import Failure, Record, Verdict, decision_key, end_key, release_key
from stasis.core.steps import Step
from stasis.errors import CheckpointFailed

Result = Callable[[int, Mapping[str, Any]], dict[str, Any]]


class Gang:
    """Two ranks and what they were told to do; every port answers at once."""

    def __init__(self, **results: Result) -> None:
        self.records: dict[str, Record] = {}
        self.steps: list[tuple[int, Step, Mapping[str, Any]]] = []
        self.notices: list[m.Notice] = []
        self.drivers: dict[str, Driver] = {}
        self.results = {Step(name.replace("_", "-")): result for name, result in results.items()}
        self.journals: dict[int, dict[str, Any] | None] = {0: None, 1: None}
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def send(self, to: str, message: Message) -> None:
        if driver := self.drivers.get(to):
            driver.post(message)

    def create(self, key: str, record: Record, reply: Reply) -> None:
        self.records.setdefault(key, record)
        reply(m.RecordIs(key, self.records[key]))

    def read(self, key: str, reply: Reply) -> None:
        reply(m.RecordIs(key, self.records.get(key)))

    def run(self, spec: Spec, hook: Hook = no_hook, epoch: int = 1) -> m.Ended:
        self.notices.clear()
        coordinator = CoordinatorDriver(
            Coordinator(spec, epoch, hook), clock=self, transport=self, records=self, notify=self.notices.append
        )
        self.drivers = {coordinator_address(spec.op, epoch): coordinator}
        for rank in spec.ranks:
            seat = Seat(self, rank)
            self.drivers[member_address(spec.op, rank)] = MemberDriver(
                Member(rank),
                boot="b",
                clock=self,
                transport=self,
                records=self,
                executor=seat,
                guardian=seat,
                journal=seat,
            )
        for _ in range(1000):
            for driver in self.drivers.values():
                driver.pump()
            if self.notices and isinstance(self.notices[-1], m.Ended):
                return self.notices[-1]
            self.time += 0.1
        raise AssertionError("it does not end")

    def steps_of(self, rank: int) -> list[Step]:
        return [step for who, step, _ in self.steps if who == rank]

    def args_of(self, step: Step, rank: int) -> Mapping[str, Any]:
        return next(args for who, what, args in self.steps if (who, what) == (rank, step))


class Seat:
    """One rank's executor, guardian and journal."""

    def __init__(self, gang: Gang, rank: int) -> None:
        self.gang = gang
        self.rank = rank
        self._fate = ""

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None:
        self.gang.steps.append((self.rank, step, args))
        result = self.gang.results.get(step, nothing)
        try:
            reply(m.StepDone(token, result(self.rank, args)))
        except CheckpointFailed as error:
            reply(m.StepFailed(token, Failure.of(error, rank=self.rank, step=step)))

    def arm(self, op: str, deadline: float, poll: float, reply: Reply) -> None:
        reply(m.GuardianUp(deadline))

    def claim(self, value: str) -> str:
        self._fate = self._fate or value
        return self._fate

    def fate(self) -> str | None:
        return self._fate

    def disarm(self) -> None:
        self._fate = ""

    def load(self) -> dict[str, Any] | None:
        return self.gang.journals[self.rank]

    def save(self, journal: Mapping[str, Any]) -> None:
        self.gang.journals[self.rank] = dict(journal)


def nothing(rank: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def store(rank: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"manifest": f"sha256:{rank}"}


def failing(only: int) -> Result:
    def fail(rank: int, args: Mapping[str, Any]) -> dict[str, Any]:
        if rank == only:
            raise CheckpointFailed("the disk is full")
        return {}

    return fail


def suspend(op: str = "c", serial: int = 1, kind: Kind = Kind.RELEASE) -> Spec:
    return Spec(op, serial, kind, (0, 1))


def restore(serial: int = 2, **changes: Any) -> Spec:
    return Spec(f"r{serial}", serial, Kind.RESTORE, (0, 1), checkpoint="c", requires=("c",), **changes)


def test_a_suspend_commits_what_every_rank_stored_and_then_releases() -> None:
    gang = Gang(store=store)
    assert gang.run(suspend()).outcome is Outcome.RELEASED
    commit = gang.records[decision_key("c")]
    assert (commit.verdict, commit.manifests) == (Verdict.COMMIT, {0: "sha256:0", 1: "sha256:1"})
    assert gang.records[release_key("c")].verdict is Verdict.RELEASE
    assert gang.steps_of(1)[-3:] == [Step.UNLOCK_NETWORK, Step.STORE, Step.RELEASE]


def test_a_checkpoint_that_goes_on_thaws_before_it_stores() -> None:
    gang = Gang(store=store)
    assert gang.run(suspend(kind=Kind.CONTINUE)).outcome is Outcome.CONTINUED
    assert gang.steps_of(0)[-6:] == [
        Step.THAW,
        Step.RESTORE_DEVICES,
        Step.UNLOCK_DEVICES,
        Step.REBUILD,
        Step.STORE,
        Step.CONTINUE,
    ]


def test_one_refusal_and_nothing_happened() -> None:
    gang = Gang(prepare=failing(1))
    ended = gang.run(suspend())
    assert ended.outcome is Outcome.ABORTED
    assert [str(failure) for failure in ended.failures] == ["rank 1: prepare: the disk is full (CheckpointFailed)"]
    assert set(gang.steps_of(0)) == {Step.PREPARE, Step.CONTINUE}


def test_a_rank_that_fails_to_store_wakes_all() -> None:
    gang = Gang(store=lambda rank, args: failing(0)(rank, args) or store(rank, args))
    assert gang.run(suspend()).outcome is Outcome.ABORTED
    assert gang.records[decision_key("c")].verdict is Verdict.ABORT
    for rank in (0, 1):
        undone = [Step.THAW, Step.RESTORE_DEVICES, Step.UNLOCK_DEVICES, Step.REBUILD, Step.CONTINUE]
        assert gang.steps_of(rank)[-5:] == undone


def test_a_suspend_withdrawn_at_the_commit_continues() -> None:
    coordinator = Coordinator(suspend(), 1)
    coordinator.handle(m.Started(), 0.0)
    for key in (end_key("c"), release_key("c")):
        coordinator.handle(m.RecordIs(key, None), 0.0)
    coordinator.handle(m.Withdraw(), 0.0)
    commit = Record(Verdict.COMMIT, "c", 1, 1, (0, 1), (), {0: "a", 1: "b"})
    effects = coordinator.handle(m.RecordIs(decision_key("c"), commit), 0.0)
    written = [effect.record.verdict for effect in effects if isinstance(effect, m.Create)]
    assert written == [Verdict.CONTINUE]


def test_the_callers_word_stops_it_or_goes_along() -> None:
    def refuse(step: Step, results: Mapping[int, Mapping[str, Any]]) -> Mapping[int, Mapping[str, Any]]:
        if step is Step.CAPTURE:
            raise CheckpointFailed("ranks 0 and 1 contradict each other")
        return {}

    def add(step: Step, results: Mapping[int, Mapping[str, Any]]) -> Mapping[int, Mapping[str, Any]]:
        return {rank: {"seen": sorted(results)} for rank in results} if step is Step.CAPTURE else {}

    gang = Gang(store=store)
    ended = gang.run(suspend(), refuse)
    assert (ended.outcome, ended.failures[0].message) == (Outcome.ABORTED, "ranks 0 and 1 contradict each other")
    assert Step.STORE not in gang.steps_of(0)
    gang = Gang(store=store)
    assert gang.run(suspend(), add).outcome is Outcome.RELEASED
    assert gang.args_of(Step.STORE, 1) == {"seen": [0, 1]}
    assert gang.args_of(Step.FREEZE, 1) == {}


def test_a_restore_takes_its_manifests_from_the_commit_alone() -> None:
    gang = Gang(store=store)
    gang.run(suspend())
    lies = {Step.RESTORE: {"*": {"manifest": "sha256:other"}}}
    assert gang.run(restore(args=lies)).outcome is Outcome.RESTORED
    for rank in (0, 1):
        assert gang.args_of(Step.RESTORE, rank)["manifest"] == f"sha256:{rank}"
    assert gang.steps_of(0)[-6:-3] == [Step.RELEASE_NETWORK, Step.POKE_NETWORK, Step.THAW]


def test_a_failed_restore_is_torn_down_and_tried_again() -> None:
    tries = iter([True, False])
    gang = Gang(store=store, restore=lambda rank, args: failing(0 if rank == 0 and next(tries) else -1)(rank, args))
    gang.run(suspend())
    assert gang.run(restore()).outcome is Outcome.RESTORED
    begun = gang.steps_of(0)
    assert begun.count(Step.RESTORE) == 2
    assert begun.index(Step.TEAR_DOWN) < len(begun) - begun[::-1].index(Step.PLACE) - 1


def test_a_restore_that_fails_each_time_leaves_nothing() -> None:
    gang = Gang(store=store, restore=failing(1))
    gang.run(suspend())
    assert gang.run(restore(attempts=2)).outcome is Outcome.ABANDONED
    assert Step.THAW not in gang.steps_of(0)[gang.steps_of(0).index(Step.PLACE) :]
    assert gang.steps_of(0)[-1] is gang.steps_of(1)[-1] is Step.TEAR_DOWN


@pytest.mark.parametrize("verdict", [Verdict.ABORT, None])
def test_nothing_is_restored_from_what_is_not_committed(verdict: Verdict | None) -> None:
    gang = Gang()
    if verdict:
        gang.records[decision_key("c")] = Record(verdict, "c", 1)
    ended = gang.run(Spec("r", 2, Kind.RESTORE, (0, 1), checkpoint="c"))
    assert (ended.outcome, ended.failures[0].reason) == (Outcome.ABANDONED, "NotFound")
    assert not gang.steps


def test_nothing_is_restored_while_the_gang_runs() -> None:
    gang = Gang(store=store)
    gang.run(suspend(kind=Kind.CONTINUE))
    gang.steps.clear()
    ended = gang.run(restore())
    assert (ended.outcome, ended.failures[0].reason) == (Outcome.ABANDONED, "RestoreFailed")
    assert not gang.steps


def test_a_rank_that_ended_is_told_with_its_status() -> None:
    def prepare(rank: int, args: Mapping[str, Any]) -> dict[str, Any]:
        if rank == 1:
            gang.drivers[member_address("c", 1)].post(m.TreeExited(0))
        return {}

    gang = Gang(prepare=prepare, store=store)
    ended = gang.run(suspend())
    assert (ended.outcome, dict(ended.exited)) == (Outcome.ABORTED, {1: 0})
    gang = Gang(store=store)
    assert gang.run(Spec("c2", 2, Kind.RELEASE, (0,), finished=(1,))).outcome is Outcome.RELEASED
    assert gang.records[decision_key("c2")].finished == (1,)


def test_an_operation_led_again_ends_as_it_ended() -> None:
    gang = Gang(store=store)
    gang.run(suspend())
    begun = len(gang.steps)
    assert gang.run(suspend(), epoch=2).outcome is Outcome.RELEASED
    assert len(gang.steps) == begun


@pytest.mark.parametrize(
    ("now", "voted", "decision", "release", "expected"),
    [
        (9.0, False, None, None, Duty.WAIT),
        (10.0, False, None, None, Duty.RESCUE),
        (99.0, True, None, None, Duty.WAIT),
        (99.0, True, Verdict.COMMIT, None, Duty.WAIT),
        (1.0, True, Verdict.ABORT, None, Duty.RESCUE),
        (1.0, True, Verdict.COMMIT, Verdict.CONTINUE, Duty.RESCUE),
        (99.0, True, Verdict.COMMIT, Verdict.RELEASE, Duty.LEAVE),
    ],
)
def test_a_guardian_heeds_its_deadline_before_the_vote_and_the_records_after_it(
    now: float, voted: bool, decision: Verdict | None, release: Verdict | None, expected: Duty
) -> None:
    records = [Record(verdict, "c", 1) if verdict else None for verdict in (decision, release)]
    assert duty(now, 10.0, voted=voted, decision=records[0], release=records[1]) is expected


def test_late_device_calls_are_looked_at_until_none_is_left() -> None:
    answers = iter([True, True, False])
    gang = Gang(
        save_devices=failing(0),
        unlock_devices=lambda rank, args: {"unsettled": rank == 0 and next(answers)},
    )
    assert gang.run(Spec("c", 1, Kind.RELEASE, (0, 1), timing=Timing(retry=0.1))).outcome is Outcome.ABORTED
    assert gang.steps_of(0).count(Step.RESTORE_DEVICES) == 3
    assert gang.steps_of(0)[-2:] == [Step.REBUILD, Step.CONTINUE]
