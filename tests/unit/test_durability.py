"""What becomes of checkpoints that are on their nodes' disks alone."""

from __future__ import annotations

import pytest

from stasis.core.actions import OpenResume, Publish, Upload
from stasis.core.decide import decide
from stasis.core.durability import POLL, Standing, Told, standing
from stasis.core.durability import Upload as State
from stasis.core.gate import Held
from stasis.core.plan import Kind, Outcome
from stasis.core.view import Checkpoint, Job, JobSet, Operation, Retention, View
from stasis.core.view import Policy as Rules

DONE = Told("a", State.DONE)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ({0: DONE, 1: Told("b", State.DONE)}, Standing(durable=True)),
        (
            {0: DONE, 1: Told("b", State.UNDER_WAY, "503")},
            Standing(message="not yet in the registry, only on node b; node b: 503"),
        ),
        (
            {0: Told("b", None, "no route", 60.0), 1: Told("a", State.UNDER_WAY)},
            Standing(message="not yet in the registry, only on nodes a, b; node b: no route"),
        ),
    ],
)
def test_it_is_durable_when_all_nodes_say_so(ranks: dict[int, Told], found: Standing) -> None:
    assert standing(ranks, 60.0) == found


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (Told("b", State.MISSING), "rank 1: node b does not have it any more"),
        (Told("b", State.BROKEN, "sha256:0 is missing"), "rank 1, node b: sha256:0 is missing"),
        (Told("b", None, "", 60.1), "rank 1: its only copy is on node b, which is gone or does not answer"),
    ],
)
def test_it_is_lost_when_one_rank_s_only_copy_is(told: Told, why: str) -> None:
    found = standing({0: DONE, 1: told}, 60.0)
    assert (found.lost, found.durable) == (why, False)


def made(serial: int, *, local: bool = False, lost: bool = False, published: bool = False) -> Checkpoint:
    operation = Operation(f"u{serial}", serial, Kind.RELEASE, {0: "p"}, outcome=Outcome.RELEASED, concluded=True)
    name = f"gpt-{serial}"
    return Checkpoint(
        name, f"u{serial}", "job", Kind.RELEASE, serial, operation, local=local, lost=lost, published=published
    )


def view(*checkpoints: Checkpoint, keep: int = 3) -> View:
    """Of a job that is suspended in the last of them, and is to run again."""
    jobset = JobSet(suspend=True, ranks=1, gate=Held(checkpoints[-1].name))
    rules = Rules(retention=Retention(keep=keep))
    return View(1000.0, Job("job", suspend=False), jobset, checkpoints=checkpoints, policy=rules)


def test_it_is_uploaded_before_it_is_published_or_resumed_from() -> None:
    decision = decide(view(made(1, local=True)))
    assert decision.actions == (Upload("gpt-1"),)
    assert decision.again == POLL
    actions = decide(view(made(1))).actions
    assert Publish("gpt-1") in actions
    assert any(isinstance(action, OpenResume) for action in actions)


def test_one_that_is_lost_is_not_published() -> None:
    assert not any(isinstance(action, Publish) for action in decide(view(made(1, lost=True))).actions)


def test_retention_waits_for_its_upload() -> None:
    checkpoints = made(1, local=True), made(2, published=True)
    assert decide(view(*checkpoints, keep=1)).actions[0] == Upload("gpt-1")
    assert not [action for action in decide(view(*checkpoints, keep=1)).actions if "Expire" in type(action).__name__]
