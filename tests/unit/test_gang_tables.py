"""Plans, messages and records: the tables of the gang protocol and its words as JSON."""

from __future__ import annotations

import json

import pytest

from stasis.core.messages import Decided, Order, Report, Standing, message_from_dict
from stasis.core.plan import CAPTURE_INDEX, PLANS, ROUNDS, VOTES, Kind, Spec, Stage, Timing, after, follows, undoing
from stasis.core.records import Failure, Record, Verdict
from stasis.core.steps import Step
from stasis.errors import Finding, Refused, UsageError

CHECKPOINTS = (Kind.RELEASE, Kind.CONTINUE)
UNDO_ALL = (
    Step.UNLOCK_NETWORK,
    Step.THAW,
    Step.RESTORE_DEVICES,
    Step.UNLOCK_DEVICES,
    Step.REBUILD,
    Step.CONTINUE,
)


def at(kind: Kind, step: Step, number: int = 1) -> int:
    return PLANS[kind].index(Stage(step, number))


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_devices_are_saved_before_the_freeze_and_the_network_locked_after_it(kind: Kind) -> None:
    steps = [stage.step for stage in PLANS[kind]]
    order = [Step.QUIESCE, Step.LOCK_DEVICES, Step.SAVE_DEVICES, Step.FREEZE, Step.DRAIN, Step.LOCK_NETWORK]
    assert [steps.index(step) for step in order] == sorted(steps.index(step) for step in order)


def test_only_a_checkpoint_that_goes_on_thaws_before_it_stores() -> None:
    assert Step.THAW not in [stage.step for stage in PLANS[Kind.RELEASE]]
    assert at(Kind.CONTINUE, Step.THAW) < at(Kind.CONTINUE, Step.STORE)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_network_is_locked_again_while_bytes_are_in_flight_for_a_few_rounds(kind: Kind) -> None:
    index, path = at(kind, Step.FREEZE), []
    while index != CAPTURE_INDEX:
        index = after(kind, index, in_flight=True)
        path.append(PLANS[kind][index].step)
    rounds = [Step.DRAIN, Step.LOCK_NETWORK, Step.UNLOCK_NETWORK] * ROUNDS
    assert path == [*rounds[:-1], Step.CAPTURE]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_nothing_in_flight_leads_from_any_lock_to_the_capture(kind: Kind) -> None:
    for number in range(1, ROUNDS + 1):
        locked = at(kind, Step.LOCK_NETWORK, number)
        assert after(kind, locked, in_flight=False) == CAPTURE_INDEX
        assert follows(kind, locked, CAPTURE_INDEX)
    assert not follows(kind, at(kind, Step.DRAIN), CAPTURE_INDEX)


def test_a_rank_takes_no_stage_out_of_turn() -> None:
    for kind, plan in PLANS.items():
        for done in range(-1, len(plan)):
            allowed = {index for index in range(len(plan)) if follows(kind, done, index)}
            assert allowed <= {done + 1, CAPTURE_INDEX}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_only_what_may_have_begun_is_undone(kind: Kind) -> None:
    def undone(step: Step) -> tuple[Step, ...]:
        index = at(kind, step)
        return undoing(kind, index, index - 1)

    assert undone(Step.PREPARE) == UNDO_ALL[5:]
    assert undone(Step.QUIESCE) == UNDO_ALL[4:]
    assert undone(Step.LOCK_DEVICES) == UNDO_ALL[3:]
    assert undone(Step.SAVE_DEVICES) == UNDO_ALL[2:]
    assert undone(Step.FREEZE) == UNDO_ALL[1:]
    assert undone(Step.LOCK_NETWORK) == UNDO_ALL
    assert undone(Step.CAPTURE) == UNDO_ALL


def test_what_is_undone_is_not_undone_again() -> None:
    stored = VOTES[Kind.RELEASE]
    assert undoing(Kind.RELEASE, stored, stored) == UNDO_ALL[1:]  # the network was unlocked after the capture
    stored = VOTES[Kind.CONTINUE]
    assert undoing(Kind.CONTINUE, stored, stored) == (Step.CONTINUE,)
    assert undoing(Kind.CONTINUE, stored, -1) == UNDO_ALL  # a restarted agent cannot know


def test_a_restore_is_undone_as_a_whole() -> None:
    for begun in range(len(PLANS[Kind.RESTORE])):
        assert undoing(Kind.RESTORE, begun, begun) == (Step.TEAR_DOWN,)


def spec(**changes: object) -> Spec:
    return Spec(**{"op": "a", "serial": 1, "kind": Kind.RELEASE, "ranks": (0, 1), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": ()},
        {"serial": 0},
        {"attempts": 0},
        {"checkpoint": "b"},
        {"kind": Kind.RESTORE},
        {"timing": Timing(frozen=30, margin=5, lease=15, takeover=10)},
        {"timing": Timing(prepared=5, margin=5)},
    ],
)
def test_a_wrong_description_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        spec(**changes)


def test_arguments_of_a_rank_win_over_those_of_all() -> None:
    args = {Step.PREPARE: {"*": {"a": 1, "b": 1}, "1": {"b": 2}}}
    assert spec(args=args).args_for(Step.PREPARE, 0) == {"a": 1, "b": 1}
    assert spec(args=args).args_for(Step.PREPARE, 1) == {"a": 1, "b": 2}
    assert spec(args=args).args_for(Step.STORE, 1) == {}


def test_a_description_survives_json() -> None:
    whole = spec(
        kind=Kind.RESTORE,
        checkpoint="c",
        finished=(2,),
        requires=("c",),
        args={"place": {"0": {"x": [1]}}},
        timing=Timing(limits={"store": 9.0}),
    )
    assert Spec.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


RECORD = Record(Verdict.COMMIT, "a", 3, 1, (0, 2), (1,), {0: "sha256:0", 2: "sha256:2"}, "", ())
FAILURE = Failure("CheckpointFailed", "no", "do", 1, "store", False, {"status": 0})


@pytest.mark.parametrize(
    "message",
    [
        Order("a", 1, Kind.RESTORE, 2, 3, 4, Timing(), {"x": 1}, RECORD),
        Order("a", 1, Kind.RELEASE, 1, 3, 4, Timing()),
        Decided("a", 1, Kind.RELEASE, 1, 3, Timing(), RECORD),
        Report("a", 1, 0, 3, Standing.DONE, 4, {"manifest": "sha256:0"}, None, None),
        Report("a", 1, 0, 3, Standing.ABORTED, -1, {}, FAILURE, 0),
    ],
)
def test_a_message_survives_json(message: Order | Decided | Report) -> None:
    again = message_from_dict(json.loads(json.dumps(message.to_dict())))
    assert again == message
    assert type(again) is type(message)


def test_a_record_survives_json() -> None:
    ended = Record(Verdict.ENDED, "a", 3, outcome="aborted", failures=(FAILURE,))
    for record in (RECORD, ended):
        assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_a_refusal_keeps_its_findings() -> None:
    finding = Finding("io_uring", "USE_LIBUV=0", pid=7, comm="python")
    failure = Failure.of(Refused([finding]), rank=1, step=Step.PREPARE)
    assert failure.reason == "Refused"
    assert [Finding(**data) for data in failure.detail["findings"]] == [finding]
    assert "rank 1: prepare: process 7 (python)" in str(failure)
