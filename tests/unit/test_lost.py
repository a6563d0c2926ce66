"""A node that is not ready: waited for as long as the policy says, and then its ranks are lost."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.test_decide import (
    ASKED,
    NOW,
    PODS,
    RELEASED,
    RESUMED,
    RUNNING,
    SUSPENDED,
    due,
    operation,
    restore,
    with_checkpoint,
)
from tests.unit.test_lineage import TRAINING

from stasis.core import actions as a
from stasis.core.decide import decide
from stasis.core.gate import Suspend
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Verdict
from stasis.core.view import Checkpoint, Policy, View

POLICY = Policy(lost_after=120.0)
SILENT = replace(PODS[1], node="n2", unready_since=NOW - 50)
LOST = replace(SILENT, unready_since=NOW - 120)
LATER = replace(ASKED, pods=(PODS[0], SILENT), policy=POLICY)
TOO_LATE = replace(LATER, pods=(PODS[0], LOST))


def driven(view: View) -> a.Drive:
    return next(action for action in due(view) if isinstance(action, a.Drive))


def test_a_suspend_waits_for_a_node_that_is_not_ready_and_its_user_knows_which() -> None:
    decision = decide(LATER)
    (told,) = decision.actions
    assert isinstance(told, a.Tell)
    assert told.reason == "NodeNotReady"
    assert "pod gpt-1 on node n2" in told.message
    assert decision.again == 70.0


def test_it_waits_no_longer_than_the_suspend_may_be_held_back() -> None:
    assert decide(replace(LATER, policy=replace(POLICY, timeout=40.0))).again == 35.0


def test_without_a_checkpoint_a_training_that_lost_a_rank_begins_anew_and_its_user_is_told() -> None:
    (action,) = due(TOO_LATE)
    assert isinstance(action, a.SetGate)
    assert (action.gate, action.reason) == (Suspend(), "StartedFresh")
    assert "rank 1 (node n2 is not ready) is lost" in action.message


def test_so_is_one_whose_pod_is_being_deleted() -> None:
    (action,) = due(replace(ASKED, pods=(PODS[0], replace(PODS[1], terminating=True))))
    assert isinstance(action, a.SetGate)
    assert action.reason == "StartedFresh"
    assert "rank 1 (its pod was deleted) is lost" in action.message


def test_the_ranks_go_back_together_to_the_last_checkpoint() -> None:
    lost = replace(TRAINING.pods[1], terminating=False, node="n2", unready_since=NOW - 120)
    view = replace(TRAINING, pods=(TRAINING.pods[0], lost), policy=POLICY)
    assert due(view) == [a.GoBack("gpt-1", "rank 1 (node n2 is not ready) is lost")]


def test_also_those_that_failed_since_another_ones_node_died() -> None:
    lost = replace(TRAINING.pods[1], terminating=False, node="n2", unready_since=NOW - 120)
    failed = replace(TRAINING.pods[0], running=False, failed=True)
    anew = replace(TRAINING.pods[0], uid="r0", told=True)
    view = replace(TRAINING, pods=(failed, anew, lost), policy=POLICY)
    words = "rank 0 (its trainer failed), rank 1 (node n2 is not ready) are lost"
    assert due(view) == [a.GoBack("gpt-1", words)]
    (action,) = due(replace(view, checkpoints=()))
    assert isinstance(action, a.SetGate)
    assert action.reason == "StartedFresh"


def test_an_operation_is_told_of_the_ranks_that_went_with_their_node() -> None:
    for kind in (Kind.RELEASE, Kind.CONTINUE):
        checkpoint = Checkpoint("gpt-1", "c1", "j", kind, 1, operation(kind))
        assert driven(with_checkpoint(LATER, checkpoint)).lost == ()
        assert driven(with_checkpoint(TOO_LATE, checkpoint)).lost == (1,)
        assert decide(with_checkpoint(replace(LATER, job=RUNNING.job), checkpoint)).again == 70.0


def test_also_where_its_job_is_gone() -> None:
    checkpoint = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation())
    assert driven(with_checkpoint(replace(TOO_LATE, job=None), checkpoint)).lost == (1,)


def test_a_restore_is_told_too() -> None:
    assert RESUMED.jobset is not None
    pods = (RESUMED.pods[0], replace(RESUMED.pods[1], node="n2", unready_since=NOW - 120))
    checkpoint = replace(RESUMED.checkpoints[0], restore=restore())
    view = replace(RESUMED, jobset=replace(RESUMED.jobset, restoring=2), pods=pods, policy=POLICY)
    assert driven(with_checkpoint(view, checkpoint)).lost == (1,)


def test_after_the_release_is_recorded_the_end_does_not_wait_for_the_node() -> None:
    verdicts = frozenset({Verdict.COMMIT, Verdict.RELEASE})
    checkpoint = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation(verdicts=verdicts))
    assert driven(with_checkpoint(TOO_LATE, checkpoint)).lost == (1,)


def test_a_resume_does_not_run_a_rank_that_may_still_run_and_its_user_knows_where() -> None:
    view = replace(SUSPENDED, job=replace(RUNNING.job, suspend=False), pods=(LOST,), policy=POLICY)
    (told,) = due(view)
    assert isinstance(told, a.Tell)
    assert told.reason == "WaitingForNode"
    assert "pod gpt-1 on node n2" in told.message
    assert RELEASED.outcome is Outcome.RELEASED
    assert isinstance(due(replace(view, pods=()))[0], a.OpenResume)


def test_nothing_is_made_of_a_silent_node_while_no_one_asks_for_anything() -> None:
    assert due(replace(TOO_LATE, job=RUNNING.job)) == []


def test_a_rank_that_has_ended_is_not_lost_with_its_node() -> None:
    ended = replace(LOST, running=False, succeeded=True)
    (action,) = due(replace(TOO_LATE, pods=(PODS[0], ended)))
    assert isinstance(action, a.Create)
