"""What the controller remembers of what its watches have told."""

from __future__ import annotations

from typing import Any

from stasis.api import names
from stasis.controllers.seen import Seen

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


def _job(choice: str) -> dict[str, Any]:
    about = {"namespace": KEY[0], "name": KEY[1], "uid": "1", "annotations": {names.FROM: choice}}
    return {"metadata": about, "spec": {"suspend": True}}
