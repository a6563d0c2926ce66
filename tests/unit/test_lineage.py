"""A gang that has lost ranks goes back as a whole to the last checkpoint that its training has gone through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.test_decide import ASKED, PLACEHOLDERS, PODS, RELEASED, SAVED, due, operation, restore

from stasis.core import actions as a
from stasis.core.gate import Suspend
from stasis.core.lineage import last
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Verdict
from stasis.core.view import Checkpoint, Pod, Use, View

RESTORED = replace(
    SAVED,
    use=Use.RESTORED,
    restore=restore(outcome=Outcome.RESTORED, verdicts=frozenset({Verdict.ENDED}), concluded=True),
)
TAKEN = Checkpoint(
    "gpt-3", "c3", "j", Kind.CONTINUE, 3,
    replace(operation(Kind.CONTINUE, 3, outcome=Outcome.CONTINUED, concluded=True), pods={0: "q0", 1: "q1"}),
    published=True,
)  # fmt: skip
LOST = replace(PLACEHOLDERS[1], terminating=True)
TRAINING = replace(ASKED, pods=(PLACEHOLDERS[0], LOST), checkpoints=(RESTORED,))
NEW = replace(PLACEHOLDERS[1], uid="r1")  # in the place of the lost one


@pytest.mark.parametrize("pods", [(), (LOST,), (NEW,), (replace(NEW, running=False),)])
def test_the_survivors_of_a_lost_node_go_back_to_what_they_were_resumed_from(pods: tuple[Pod, ...]) -> None:
    view = replace(TRAINING, pods=(PLACEHOLDERS[0], *pods))
    assert due(view) == [a.GoBack("gpt-1", "rank 1 (its pod was deleted) is lost")]
    chosen = replace(RESTORED, use=Use.CHOSEN)
    assert due(replace(view, checkpoints=(chosen,))) == [a.SetGate(Suspend("gpt-1"), "", "")]


def test_a_checkpoint_taken_beside_the_training_is_newer_than_what_it_was_resumed_from() -> None:
    assert last((RESTORED, TAKEN)) == TAKEN
    assert due(replace(TRAINING, checkpoints=(RESTORED, TAKEN)))[0] == a.GoBack(
        "gpt-3", "rank 1 (its pod was deleted) is lost"
    )
    resumed_again = replace(RESTORED, restore=replace(restore(), serial=4, outcome=Outcome.RESTORED, concluded=True))
    assert last((resumed_again, TAKEN)) == resumed_again


def test_a_training_that_has_begun_anew_does_not_go_back() -> None:
    assert last((replace(RESTORED, use=Use.FRESH),)) is None
    assert last((replace(SAVED, operation=RELEASED),)) is None


@pytest.mark.parametrize(
    "pods",
    [
        (PLACEHOLDERS[0], replace(LOST, terminating=False, running=False, failed=True)),  # its trainer failed
        (PLACEHOLDERS[0], replace(NEW, told=True)),  # it trains anew
        (PLACEHOLDERS[0], replace(PODS[1], uid="r1")),
        (LOST,),  # nothing is left: JobSet begins the whole gang anew
        (PLACEHOLDERS[0], replace(PLACEHOLDERS[1], running=False, succeeded=True)),  # it has ended well
        PLACEHOLDERS,
    ],
)
def test_what_is_dealt_with_as_without_stasis_does_not_go_back(pods: tuple[Pod, ...]) -> None:
    assert not any(isinstance(action, a.GoBack) for action in due(replace(TRAINING, pods=pods)))


@pytest.mark.parametrize("why", [{"lost": True}, {"deleting": True}])
def test_a_checkpoint_that_is_gone_is_none_to_go_back_to(why: dict[str, bool]) -> None:
    view: View = replace(TRAINING, checkpoints=(replace(RESTORED, **why),))  # type: ignore[arg-type]
    assert not any(isinstance(action, a.GoBack) for action in due(view))
