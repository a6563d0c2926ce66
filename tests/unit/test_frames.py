"""What controller and agent send each other arrives as it was, and nothing else is taken for it."""

from __future__ import annotations

import json

import pytest

from stasis.core.frames import Answer, Command, Forget, Frame, Home, Progress, frame_from_dict
from stasis.core.messages import Decided, Order, Report, Standing
from stasis.core.plan import Kind, Timing
from stasis.core.records import Failure, Record, Verdict
from stasis.errors import UsageError

HOME = Home("team", "gpt-3", "1-2-3")
ORDER = Order("op", 3, Kind.RELEASE, 1, 7, 0, Timing(), {"rank": 1})
RECORD = Record(Verdict.RELEASE, "op", 7, ranks=(0, 1), manifests={0: "sha256:0"})
FRAMES = [
    Command("op#1", ORDER, HOME),
    Command("op#1", ORDER, HOME, '{"auths": {}}'),
    Command("op#1", Decided("op", 3, Kind.RELEASE, 1, 7, Timing(), RECORD), HOME),
    Forget("op"),
    Answer("op@7", Report("op", 1, 1, 7, Standing.ABORTED, failure=Failure("Refused", "no"))),
    Progress("op", 1, 1 << 40),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_arrives_as_it_was(frame: Frame) -> None:
    assert frame_from_dict(json.loads(json.dumps(frame.to_dict()))) == frame


def test_credentials_are_not_told_by_a_frames_text() -> None:
    assert "secret" not in repr(Command("op#1", ORDER, HOME, "secret"))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "1",
        "{}",
        '{"to": "op#1"}',
        '{"to": "op#1", "message": {"type": "order"}, "checkpoint": {}}',
        '{"to": "op#1", "message": {"type": "gossip"}}',
        '{"progress": {"op": "op", "rank": "first", "bytes": 1}}',
        json.dumps({"to": "op#1", "message": ORDER.to_dict()}),
    ],
)
def test_what_is_no_frame_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        frame_from_dict(json.loads(text))
