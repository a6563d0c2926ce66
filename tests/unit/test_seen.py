"""What the controller remembers of what its watches have told."""

from __future__ import annotations

from typing import Any

from stasis.api import names
from stasis.controllers.seen import Seen
from stasis.core.view import View

KEY = ("team-a", "gpt")


def test_a_choice_is_refused_once_and_anew_when_it_is_made_again() -> None:
    seen = Seen(lambda key: None)
    seen.trainjob(_job("nothing/gpt-1"), deleted=False)
    assert seen.refuses(KEY, "there is none")
    assert not seen.refuses(KEY, "there is none")
    assert seen.refuses(KEY, "it is gone")
    seen.trainjob(_job(""), deleted=False)
    seen.trainjob(_job("nothing/gpt-1"), deleted=False)
    assert seen.refuses(KEY, "it is gone")


def test_a_choice_that_was_withdrawn_while_it_was_looked_at_is_not_refused() -> None:
    seen = Seen(lambda key: None)
    seen.trainjob(_job("nothing/gpt-1"), deleted=False)
    assert seen.refuses(KEY, "there is none")
    seen.trainjob(_job(""), deleted=False)
    assert not seen.refuses(KEY, "there is none")
    seen.trainjob(_job("nothing/gpt-1"), deleted=True)
    assert not seen.refuses(KEY, "there is none")


def test_what_ended_unheard_of_is_forgotten_when_the_server_is_asked() -> None:
    changed: list[tuple[str, str]] = []
    seen = Seen(changed.append)
    seen.trainjob(_job(""), deleted=False)
    seen.jobset(_jobset(), deleted=False)
    seen.checkpoint(_checkpoint("gpt-1"), deleted=False)
    before = seen.view(KEY)
    assert (before.job, before.jobset, len(before.checkpoints)) != (None, None, 0)
    changed.clear()
    seen.forget_gone(KEY, before, View(now=0.0))
    after = seen.view(KEY)
    assert (after.job, after.jobset, after.checkpoints) == (None, None, ())
    assert KEY not in seen.keys()  # noqa: SIM118
    assert set(changed) == {KEY}


def test_what_was_told_after_the_server_was_asked_is_kept() -> None:
    seen = Seen(lambda key: None)
    for obj, told in ((_job(""), seen.trainjob), (_jobset(), seen.jobset), (_checkpoint("gpt-1"), seen.checkpoint)):
        told(obj, False)
    before = seen.view(KEY)
    seen.trainjob(_job("gpt-1/gpt-2"), deleted=False)
    seen.jobset(_jobset(suspend=True), deleted=False)
    seen.checkpoint(_checkpoint("gpt-1"), deleted=True)
    seen.checkpoint(_checkpoint("gpt-2"), deleted=False)
    seen.forget_gone(KEY, before, View(now=0.0))
    after = seen.view(KEY)
    assert after.job is not None
    assert after.jobset is not None
    assert [checkpoint.name for checkpoint in after.checkpoints] == ["gpt-2"]


def _jobset(suspend: bool = False) -> dict[str, Any]:
    about = {"namespace": KEY[0], "name": KEY[1], "uid": "2", "labels": {names.POLICY_LABEL: "default"}}
    return {"metadata": about, "spec": {"suspend": suspend, "replicatedJobs": []}}


def _checkpoint(name: str) -> dict[str, Any]:
    about = {"namespace": KEY[0], "name": name, "uid": name}
    return {"metadata": about, "spec": {"trainJob": {"name": KEY[1], "uid": "1"}, "kind": "Checkpoint"}}


def _job(choice: str) -> dict[str, Any]:
    about = {"namespace": KEY[0], "name": KEY[1], "uid": "1", "annotations": {names.FROM: choice}}
    return {"metadata": about, "spec": {"suspend": True}}
