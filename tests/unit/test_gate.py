"""The gate between TrainJob and JobSet: every case, and the course of a suspend and a resume."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stasis.api import names
from stasis.core.gate import STAMPS, UNSTAMPED, Gate, Held, Open, Resume, Stamp, Suspend, admit, parse_gate
from stasis.errors import UsageError

STAMP = Stamp("gpt-1", "u1", 2, {0: "10.0.0.1", 1: "10.0.1.1"}, ("abc",), "node")
GATES: tuple[Gate, ...] = (Open(), Suspend(), Suspend("gpt-1"), Held("gpt-1"), Resume(), Resume(STAMP))
T, F = True, False

EVERY_CASE: list[tuple[tuple[Gate, bool, bool], tuple[bool, Gate, object]]] = [
    # gate, was, wanted: suspend, gate afterwards, the pods' stamps
    ((Open(), F, F), (F, Open(), None)),
    ((Open(), F, T), (F, Open(), None)),  # deferred
    ((Open(), T, F), (F, Open(), None)),  # the first start of a job made suspended
    ((Open(), T, T), (T, Open(), None)),
    ((Suspend(), F, F), (F, Suspend(), None)),
    ((Suspend(), F, T), (T, Suspend(), UNSTAMPED)),
    ((Suspend(), T, F), (F, Open(), None)),
    ((Suspend(), T, T), (T, Suspend(), UNSTAMPED)),
    ((Suspend("gpt-1"), F, F), (F, Suspend("gpt-1"), None)),
    ((Suspend("gpt-1"), F, T), (T, Held("gpt-1"), None)),
    ((Suspend("gpt-1"), T, F), (T, Held("gpt-1"), None)),  # released: a resume waits for its preflight
    ((Suspend("gpt-1"), T, T), (T, Held("gpt-1"), None)),
    ((Held("gpt-1"), F, F), (T, Held("gpt-1"), None)),  # closed by the annotation alone
    ((Held("gpt-1"), F, T), (T, Held("gpt-1"), None)),
    ((Held("gpt-1"), T, F), (T, Held("gpt-1"), None)),
    ((Held("gpt-1"), T, T), (T, Held("gpt-1"), None)),
    ((Resume(), F, F), (F, Open(), None)),
    ((Resume(), F, T), (F, Open(), None)),  # runs already, so this is another suspend: deferred
    ((Resume(), T, F), (F, Open(), UNSTAMPED)),
    ((Resume(), T, T), (T, Resume(), None)),
    ((Resume(STAMP), F, F), (F, Open(), None)),
    ((Resume(STAMP), F, T), (F, Open(), None)),
    ((Resume(STAMP), T, F), (F, Open(), STAMP.annotations())),
    ((Resume(STAMP), T, T), (T, Resume(STAMP), None)),
]


@pytest.mark.parametrize(("case", "after"), EVERY_CASE, ids=lambda c: str(c[0]))
def test_every_case(case: tuple[Gate, bool, bool], after: tuple[bool, Gate, object]) -> None:
    gate, was, wanted = case
    done = admit(gate, was=was, wanted=wanted)
    assert (done.suspend, done.gate, done.stamps) == after
    assert done.deferred == (wanted and not after[0])


def test_there_is_no_other_case() -> None:
    assert [case for case, _ in EVERY_CASE] == list(itertools.product(GATES, (F, T), (F, T)))


@pytest.mark.parametrize("case", [case for case, _ in EVERY_CASE], ids=str)
def test_what_was_admitted_is_admitted_unchanged(case: tuple[Gate, bool, bool]) -> None:
    gate, was, wanted = case
    once = admit(gate, was=was, wanted=wanted)
    again = admit(once.gate, was=was, wanted=once.suspend)
    assert (again.suspend, again.gate) == (once.suspend, once.gate)
    assert again.stamps in (None, once.stamps)


class JobSet:
    """A JobSet behind its webhook; `apply` is Trainer's write of TrainJob.spec.suspend."""

    def __init__(self) -> None:
        self.suspend, self.gate, self.stamps = False, "", dict[str, str]()

    def apply(self, suspend: bool) -> bool:
        self._write(suspend, self.gate)
        return self.suspend

    def annotate(self, gate: Gate) -> None:
        self._write(self.suspend, str(gate))

    def _write(self, suspend: bool, gate: str) -> None:
        done = admit(parse_gate(gate), was=self.suspend, wanted=suspend)
        self.suspend, self.gate = done.suspend, str(done.gate)
        self.stamps |= done.stamps or {}


def test_a_suspend_and_a_resume() -> None:
    jobset = JobSet()
    seen = [jobset.apply(True)]  # not saved yet
    jobset.annotate(Suspend("gpt-1"))
    seen.append(jobset.apply(True))
    seen.append(jobset.apply(False))  # the controller has not looked whether it can be restored
    jobset.annotate(Resume(STAMP))
    seen.append(jobset.apply(False))
    assert seen == [False, True, True, False]
    assert (jobset.gate, Stamp.of(jobset.stamps)) == ("", STAMP)


def test_suspended_and_resumed_before_anything_was_saved_runs_on() -> None:
    jobset = JobSet()
    jobset.apply(True)
    jobset.apply(False)
    assert (jobset.suspend, jobset.gate) == (False, "")


def test_resumed_after_the_release_was_recorded_stays_closed_until_the_restore() -> None:
    jobset = JobSet()
    jobset.apply(True)
    jobset.annotate(Suspend("gpt-1"))
    jobset.apply(False)  # before Trainer came to apply the suspend again
    jobset.annotate(Held("gpt-1"))
    assert jobset.suspend


def test_a_fresh_start_is_no_placeholder() -> None:
    jobset = JobSet()
    for gate, suspend in ((Held("gpt-1"), True), (Resume(STAMP), False), (Suspend(), True)):
        jobset.annotate(gate)
        jobset.apply(suspend)
    assert (jobset.suspend, Stamp.of(jobset.stamps)) == (True, None)
    assert not jobset.apply(False), "nothing is to be restored"


@given(
    st.lists(st.tuples(st.sampled_from(GATES) | st.none(), st.booleans()), max_size=12),
)
def test_a_running_gang_is_suspended_only_where_the_gate_says_so(writes: list[tuple[Gate | None, bool]]) -> None:
    jobset = JobSet()
    for gate, suspend in writes:
        was, before = jobset.suspend, jobset.gate
        if gate is not None:
            jobset.annotate(gate)
            before = str(gate)
        jobset.apply(suspend)
        if jobset.suspend and not was:
            assert isinstance(parse_gate(before), Suspend | Held)
        if isinstance(parse_gate(jobset.gate), Held):
            assert jobset.suspend


@given(st.sampled_from(GATES))
def test_a_gate_is_its_text(gate: Gate) -> None:
    assert parse_gate(str(gate)) == gate


def test_stamps_are_the_annotations_of_the_contract() -> None:
    found = STAMP.annotations()
    assert set(found) == set(STAMPS)
    assert (found[names.CHECKPOINT], found[names.CHECKPOINT_UID], found[names.RESTORE]) == ("gpt-1", "u1", "2")
    assert json.loads(found[names.ADDRESSES]) == {"0": "10.0.0.1", "1": "10.0.1.1"}


@pytest.mark.parametrize(
    "text",
    [
        "/x",
        "suspend",
        "suspend/",
        "suspend/a/b",
        "held/-",
        "held/",
        "held/a/",
        "resume/",
        "resume/a",
        "resume/a/{}",
        "resume/a/[]",
        'resume/a/{"uid":"u","generation":0}',
        'resume/a/{"uid":"","generation":1}',
        'resume/a/{"uid":"u","generation":1,"addresses":[]}',
        "open",
    ],
)
def test_what_is_no_gate_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match=r"gate|stamp|JSON"):
        parse_gate(text)


def test_a_pod_with_a_broken_stamp_is_no_fresh_pod() -> None:
    with pytest.raises(UsageError):
        Stamp.of({names.CHECKPOINT: "gpt-1", names.RESTORE: "x"})
