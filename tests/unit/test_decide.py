"""What is due for a TrainJob, view by view: each of these is a corner that some rule is about."""

from __future__ import annotations

from dataclasses import replace

from stasis.core import actions as a
from stasis.core.decide import RETRY, decide, stored
from stasis.core.gate import Gate, Held, Open, Resume, Stamp, Suspend
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Verdict
from stasis.core.retention import Stored, over_quota
from stasis.core.view import (
    Checkpoint,
    Choice,
    Failed,
    Incarnation,
    Job,
    JobSet,
    Operation,
    Pod,
    Policy,
    Retention,
    Use,
    View,
)

NOW = 1000.0
JOB = Job("j", suspend=False, generation=4, since=NOW - 5)
PODS = tuple(Pod(rank, f"gpt-{rank}", f"p{rank}", running=True) for rank in (0, 1))
RUNNING = View(NOW, JOB, JobSet(suspend=False, ranks=2), PODS)
ASKED = replace(RUNNING, job=replace(JOB, suspend=True))
WHERE = {0: "p0", 1: "p1"}


def operation(kind: Kind = Kind.RELEASE, serial: int = 1, **more: object) -> Operation:
    return Operation(f"c{serial}", serial, kind, WHERE, **more)  # type: ignore[arg-type]


RELEASED = operation(
    verdicts=frozenset({Verdict.COMMIT, Verdict.RELEASE, Verdict.ENDED}), outcome=Outcome.RELEASED, concluded=True
)
SAVED = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, RELEASED, published=True)
SUSPENDED = View(NOW, replace(JOB, suspend=True), JobSet(True, 2, Held("gpt-1")), checkpoints=(SAVED,))
STAMPED = Incarnation("c1", 2)
PLACEHOLDERS = tuple(replace(pod, uid=f"q{pod.rank}", incarnation=STAMPED) for pod in PODS)
RESUMED = View(NOW, JOB, JobSet(False, 2, incarnation=STAMPED), PLACEHOLDERS, (SAVED,))


def restore(**more: object) -> Operation:
    return Operation("c1-r2", 2, Kind.RESTORE, {0: "q0", 1: "q1"}, **more)  # type: ignore[arg-type]


def with_checkpoint(view: View, checkpoint: Checkpoint) -> View:
    return replace(view, checkpoints=(checkpoint,))


def with_gate(view: View, gate: Gate) -> View:
    assert view.jobset is not None
    return replace(view, jobset=replace(view.jobset, gate=gate))


def due(view: View) -> list[a.Action]:
    return list(decide(view).actions)


# ---------------------------------------------------------------- to be suspended


def test_nothing_is_due_for_a_job_that_runs_or_is_suspended() -> None:
    assert due(RUNNING) == []
    assert due(SUSPENDED) == []


def test_a_suspend_of_a_gang_that_runs_begins_with_a_checkpoint() -> None:
    assert due(ASKED) == [a.Create(1)]
    waiting = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE)
    assert due(with_checkpoint(ASKED, waiting)) == [a.Begin("gpt-1", 1, Kind.RELEASE, PODS, ())]


def test_a_gang_that_does_not_run_whole_is_let_go_at_once() -> None:
    for pods in (
        (),
        PODS[:1],
        (PODS[0], replace(PODS[1], running=False)),
    ):
        (action,) = due(replace(ASKED, pods=pods))
        assert isinstance(action, a.SetGate)
        assert action.gate == Suspend()
        assert action.reason == "NothingToSave"


def test_a_rank_that_has_finished_is_no_longer_needed() -> None:
    pods = (PODS[0], replace(PODS[1], running=False, succeeded=True))
    waiting = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 3)
    assert due(with_checkpoint(replace(ASKED, pods=pods), waiting)) == [
        a.Begin("gpt-1", 3, Kind.RELEASE, PODS[:1], (1,))
    ]


def test_the_gate_opens_when_the_release_is_recorded_and_not_before() -> None:
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation(verdicts=frozenset({Verdict.COMMIT})))
    assert due(with_checkpoint(ASKED, led)) == [a.Drive("gpt-1", "c1")]
    led = replace(led, operation=operation(verdicts=frozenset({Verdict.COMMIT, Verdict.RELEASE})))
    assert due(with_checkpoint(ASKED, led)) == [a.Drive("gpt-1", "c1"), a.SetGate(Suspend("gpt-1"))]


def test_a_release_that_has_ended_still_opens_the_gate() -> None:
    """Whoever led it may have died before it wrote the gate."""
    assert due(replace(ASKED, checkpoints=(SAVED,))) == [a.SetGate(Suspend("gpt-1"))]


def test_a_suspend_that_is_taken_back_withdraws_its_checkpoint() -> None:
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation())
    assert due(with_checkpoint(RUNNING, led)) == [a.Drive("gpt-1", "c1", withdraw=True)]


def test_a_release_that_is_recorded_completes_though_the_job_is_wanted_again() -> None:
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation(verdicts=frozenset({Verdict.RELEASE})))
    (drive, gate) = due(with_checkpoint(RUNNING, led))
    assert isinstance(drive, a.Drive)
    assert gate == a.SetGate(Held("gpt-1"))


def test_discard_suspends_without_saving_but_lets_a_freeze_end_first() -> None:
    discarded = replace(ASKED, job=replace(JOB, suspend=True, discard=True))
    (action,) = due(discarded)
    assert isinstance(action, a.SetGate)
    assert action.gate == Suspend()
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation())
    assert due(with_checkpoint(discarded, led)) == [a.Drive("gpt-1", "c1", withdraw=True)]


def test_a_failed_checkpoint_is_tried_again_until_the_time_is_over() -> None:
    failed = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, failed=Failed(NOW - 3, "no"))
    decision = decide(with_checkpoint(ASKED, failed))
    assert decision.actions == ()
    assert decision.again == RETRY - 3
    assert due(replace(with_checkpoint(ASKED, failed), now=NOW + RETRY)) == [a.Create(2)]
    late = replace(with_checkpoint(ASKED, failed), now=NOW + 2000)
    assert due(late) == []
    (action,) = due(replace(late, policy=Policy(suspend_anyway=True)))
    assert isinstance(action, a.SetGate)
    assert action.gate == Suspend()
    assert "no" in action.message


def test_what_the_program_stands_against_is_suspended_at_once_where_the_policy_says_so() -> None:
    failed = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, failed=Failed(NOW - 1, "userfaultfd", refused=True))
    view = replace(with_checkpoint(ASKED, failed), policy=Policy(suspend_anyway=True))
    (action,) = due(view)
    assert isinstance(action, a.SetGate)
    assert "userfaultfd" in action.message


def test_a_failure_of_an_earlier_suspend_does_not_count() -> None:
    failed = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, failed=Failed(NOW - 500, "no"))
    assert due(with_checkpoint(ASKED, failed)) == [a.Create(2)]


def test_a_suspend_taken_back_before_it_passed_finds_the_gate_shut_when_it_comes_again() -> None:
    assert due(with_gate(RUNNING, Suspend())) == [a.SetGate(Open())]
    asked = Checkpoint("mine", "m", "j", Kind.CONTINUE)
    assert due(with_checkpoint(with_gate(RUNNING, Suspend()), asked)) == [a.SetGate(Open())]
    assert due(with_checkpoint(RUNNING, asked)) == [a.Begin("mine", 1, Kind.CONTINUE, PODS, ())]


def test_a_checkpoint_that_outlasts_the_deferral_is_withdrawn() -> None:
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation())
    assert due(replace(with_checkpoint(ASKED, led), now=NOW + 900)) == [a.Drive("gpt-1", "c1", withdraw=True)]


# ---------------------------------------------------------------- suspended


def test_a_jobset_made_anew_while_suspended_is_held_for_its_checkpoint() -> None:
    assert due(with_gate(SUSPENDED, Open())) == [a.SetGate(Held("gpt-1"))]


def test_a_resume_that_has_not_passed_yet_is_taken_back() -> None:
    gate = Resume(Stamp("gpt-1", "c1", 2))
    assert due(with_gate(SUSPENDED, gate)) == [a.SetGate(Held("gpt-1"))]


# ---------------------------------------------------------------- to be resumed


def test_a_resume_waits_for_the_last_pod_of_the_former_incarnation() -> None:
    wanted = replace(SUSPENDED, job=JOB)
    assert due(replace(wanted, pods=(replace(PODS[0], terminating=True),))) == []
    assert due(wanted) == [a.OpenResume("gpt-1", 2)]
    assert due(replace(wanted, pods=(replace(PODS[0], running=False, succeeded=True),))) == [a.OpenResume("gpt-1", 2)]


def test_a_restore_begins_when_all_placeholders_run() -> None:
    assert due(RESUMED) == [a.BeginRestore("gpt-1", 2, PLACEHOLDERS)]
    assert due(replace(RESUMED, pods=PLACEHOLDERS[:1])) == []
    older = replace(PLACEHOLDERS[1], incarnation=Incarnation("c1", 1))
    assert due(replace(RESUMED, pods=(PLACEHOLDERS[0], older))) == []


def marked(view: View) -> View:
    assert view.jobset is not None
    return replace(view, jobset=replace(view.jobset, restoring=2))


def test_a_restore_is_marked_on_the_jobset_before_it_is_led() -> None:
    """Else a deposed leader that saw the checkpoint unused could still let the job be suspended to it."""
    led = with_checkpoint(RESUMED, replace(SAVED, restore=restore()))
    assert due(led) == [a.Mark(2)]
    assert due(marked(led)) == [a.Drive("gpt-1", "c1-r2")]


def test_a_restore_does_not_begin_while_the_gate_would_let_it_be_suspended() -> None:
    assert due(with_gate(RESUMED, Suspend("gpt-1"))) == [a.SetGate(Open())]


def test_suspended_again_during_a_restore_it_is_torn_down_and_its_checkpoint_stays_current() -> None:
    again = replace(RESUMED, job=replace(JOB, suspend=True))
    led = replace(SAVED, restore=restore())
    assert due(with_checkpoint(marked(again), led)) == [a.Drive("gpt-1", "c1-r2", withdraw=True)]
    ended = replace(SAVED, restore=restore(outcome=Outcome.ABANDONED, concluded=True))
    assert due(with_checkpoint(again, ended)) == [a.SetGate(Suspend("gpt-1"))]
    assert due(again) == [a.SetGate(Suspend("gpt-1"))]


def test_a_restore_that_came_to_nothing_brings_all_ranks_back_to_being_suspended() -> None:
    ended = replace(SAVED, restore=restore(outcome=Outcome.ABANDONED, concluded=True))
    assert due(with_checkpoint(RESUMED, ended)) == [a.SetGate(Held("gpt-1"))]


def test_what_cannot_be_restored_waits_for_the_user() -> None:
    stuck = replace(SAVED, use=Use.FAILED, seen=4)
    wanted = replace(with_checkpoint(SUSPENDED, stuck), job=JOB)
    assert due(wanted) == []
    assert due(replace(wanted, job=replace(JOB, generation=6))) == [a.OpenResume("gpt-1", 2)]


def test_placeholders_that_do_not_fit_are_suspended_again_until_the_user_says_something() -> None:
    refused = replace(SAVED, use=Use.FAILED, seen=4)
    assert due(with_checkpoint(RESUMED, refused)) == [a.SetGate(Held("gpt-1"))]
    edited = replace(with_checkpoint(RESUMED, refused), job=replace(JOB, generation=5))
    assert due(edited) == [a.BeginRestore("gpt-1", 2, PLACEHOLDERS)]


def test_what_cannot_be_restored_begins_anew_where_the_policy_says_so() -> None:
    fresh = Policy(start_fresh=True)
    ended = replace(SAVED, restore=restore(outcome=Outcome.ABANDONED, concluded=True), use=Use.FAILED, seen=4)
    view = replace(with_checkpoint(RESUMED, ended), policy=fresh)
    assert due(view) == [a.StartFresh("gpt-1")]
    assert due(with_checkpoint(view, replace(ended, use=Use.FRESH))) == [a.Word(PLACEHOLDERS)]
    stuck = replace(with_checkpoint(SUSPENDED, replace(SAVED, use=Use.FAILED, seen=4)), job=JOB, policy=fresh)
    assert due(stuck) == [a.StartFresh("gpt-1")]
    (action,) = due(with_checkpoint(stuck, replace(SAVED, use=Use.FRESH)))
    assert isinstance(action, a.SetGate)
    assert action.gate == Resume()


def test_a_placeholder_whose_gang_has_moved_on_is_told_to_run() -> None:
    done = replace(SAVED, restore=restore(outcome=Outcome.RESTORED, concluded=True), use=Use.RESTORED)
    assert due(with_checkpoint(RESUMED, done)) == []
    late = replace(PLACEHOLDERS[1], uid="later")
    view = replace(with_checkpoint(RESUMED, done), pods=(PLACEHOLDERS[0], late))
    assert due(view) == [a.Word((late,))]
    assert due(replace(view, pods=(PLACEHOLDERS[0], replace(late, told=True)))) == []


def test_a_checkpoint_that_is_gone_is_not_silently_replaced_by_a_fresh_start() -> None:
    lost = replace(SUSPENDED, job=JOB, checkpoints=())
    assert due(lost) == []
    (action,) = due(replace(lost, policy=Policy(start_fresh=True)))
    assert isinstance(action, a.SetGate)
    assert "no more" in action.message


def test_a_checkpoint_beside_a_training_that_does_not_run_fails_by_name_and_does_not_wait() -> None:
    beside = Checkpoint("mine", "m", "j", Kind.CONTINUE)

    def reasons(view: View) -> list[str]:
        found = due(replace(view, checkpoints=(*view.checkpoints, beside)))
        return [action.reason for action in found if isinstance(action, a.Fail)]

    assert reasons(RUNNING) == []
    for view in (ASKED, SUSPENDED, RESUMED, replace(RUNNING, pods=PODS[:1]), replace(RUNNING, pods=())):
        assert reasons(view) == ["NotRunning"]
    assert reasons(replace(RUNNING, job=replace(JOB, finished=True))) == ["NotRunning"]
    assert reasons(View(NOW, JOB)) == ["NotEnabled"]
    assert reasons(View(NOW)) == ["NotFound"]
    led = with_checkpoint(ASKED, Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation()))
    assert reasons(led) == []


# ---------------------------------------------------------------- another checkpoint is chosen

USED = replace(SAVED, use=Use.RESTORED)
SECOND = replace(SAVED, name="gpt-3", uid="c3", serial=3, operation=replace(RELEASED, op="c3", serial=3))
BESIDE = replace(SAVED, name="mine", uid="m", kind=Kind.CONTINUE, serial=2,
                 operation=operation(Kind.CONTINUE, 2, outcome=Outcome.CONTINUED, concluded=True))  # fmt: skip


def choosing(name: str, current: str, *checkpoints: Checkpoint, gate: Gate | None = None) -> View:
    job = replace(JOB, suspend=True, choice=Choice(name, current))
    return View(NOW, job, JobSet(True, 2, gate or Held("gpt-3")), checkpoints=checkpoints)


def test_a_job_is_resumed_from_the_checkpoint_that_its_user_chooses_in_place_of_the_last() -> None:
    for found in (USED, BESIDE):
        assert due(choosing(found.name, "gpt-3", found, SECOND)) == [a.Choose(found.name)]
        chosen = replace(found, use=Use.CHOSEN)
        view = choosing(found.name, "gpt-3", chosen, SECOND)
        assert due(view) == [a.PassOver("gpt-3", found.name)]
        passed = replace(SECOND, use=Use.PASSED)
        view = choosing(found.name, "gpt-3", chosen, passed)
        assert due(view) == [a.SetGate(Held(found.name))]
        view = choosing(found.name, "gpt-3", chosen, passed, gate=Held(found.name))
        assert due(view) == []
        wanted = replace(view, job=replace(JOB, choice=Choice(found.name, "gpt-3")))
        assert due(wanted) == [a.OpenResume(found.name, 4)]


def test_a_choice_is_about_the_suspend_that_it_was_made_for() -> None:
    assert due(choosing("gpt-1", "gpt-2", USED, SECOND)) == []
    running = replace(RUNNING, job=replace(JOB, choice=Choice("gpt-1", "")), checkpoints=(USED,))
    assert due(running) == []
    back = choosing(
        "gpt-3", "gpt-1", replace(USED, use=Use.CHOSEN), replace(SECOND, use=Use.PASSED), gate=Held("gpt-1")
    )
    assert due(back) == [a.Choose("gpt-3")]


def test_a_checkpoint_that_cannot_be_had_is_refused_and_the_job_waits_for_its_user() -> None:
    for bad in (
        replace(USED, lost=True),
        Checkpoint("gpt-1", "c1", "j", Kind.CONTINUE, 1, failed=Failed(NOW, "no")),
        Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, imported=True),
    ):
        view = choosing("gpt-1", "gpt-3", bad, SECOND)
        (action,) = due(replace(view, job=replace(JOB, choice=Choice("gpt-1", "gpt-3"))))
        assert isinstance(action, a.RefuseChoice)
    (action,) = due(choosing("", "gpt-3", SECOND))
    assert isinstance(action, a.RefuseChoice)


def test_a_fork_gets_a_checkpoint_of_its_own_and_is_held_for_it() -> None:
    view = choosing("other-7", "", gate=Open())
    assert due(view) == [a.Fork("other-7", 1)]
    copy = replace(SAVED, use=Use.CHOSEN, fork_of="other-7")
    assert due(with_checkpoint(view, copy)) == [a.SetGate(Held("gpt-1"))]


def test_an_imported_checkpoint_is_used_only_where_it_is_chosen() -> None:
    imported = replace(SAVED, imported=True)
    assert due(with_checkpoint(ASKED, imported)) == [a.Create(2)]
    arriving = Checkpoint("gpt-1", "c1", "other", Kind.RELEASE, imported=True)
    assert due(with_checkpoint(RUNNING, arriving)) == []
    assert due(choosing("gpt-1", "gpt-3", imported, SECOND)) == [a.Choose("gpt-1")]


# ---------------------------------------------------------------- whatever else


def test_a_preflight_that_is_asked_for_is_answered_whatever_the_job_does() -> None:
    for view in (RUNNING, SUSPENDED, View(NOW, JOB)):
        assert view.job is not None
        asked = replace(view, job=replace(view.job, check="0123456789"))
        assert due(asked)[0] == a.Check("0123456789")


def test_a_job_that_is_gone_or_made_anew_has_its_operations_withdrawn() -> None:
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation())
    gone = View(NOW, None, None, (), (led,))
    assert due(gone) == [a.Drive("gpt-1", "c1", withdraw=True, lost=(0, 1))]
    anew = replace(with_checkpoint(RUNNING, led), job=replace(JOB, uid="k"))
    assert due(anew) == [a.Drive("gpt-1", "c1", withdraw=True)]
    deleting = replace(with_checkpoint(ASKED, led), job=replace(JOB, deleting=True))
    assert due(deleting) == [a.Drive("gpt-1", "c1", withdraw=True)]


def test_a_job_made_anew_under_the_name_starts_fresh_and_its_user_is_told_what_there_is() -> None:
    anew = replace(JOB, uid="k")
    tell = a.TellNamesakes(("gpt-1",))
    assert due(replace(RUNNING, job=anew, checkpoints=(SAVED,))) == [tell, a.Orphan("gpt-1")]
    noted = replace(SAVED, orphaned_at=NOW)
    assert due(replace(ASKED, job=replace(anew, suspend=True, told=True), checkpoints=(noted,))) == [a.Create(2)]
    assert due(replace(RUNNING, job=replace(anew, told=True), checkpoints=(noted,))) == []
    assert due(replace(RUNNING, job=anew, checkpoints=(replace(noted, lost=True),))) == []


def test_the_checkpoints_of_a_job_that_is_gone_are_kept_as_the_policy_says() -> None:
    orphan = replace(SAVED, orphaned_at=NOW)
    view = View(NOW, None, None, (), (orphan,), Policy(retention=Retention(ttl_after_delete=60)))
    assert decide(view).actions == ()
    assert decide(view).again == 60
    assert due(replace(view, now=NOW + 60)) == [a.Expire("gpt-1", "its TrainJob is gone")]
    at_once = replace(view, policy=Policy(retention=Retention(delete_with_job=True)))
    assert due(at_once) == [a.Expire("gpt-1", "its TrainJob is gone")]


def test_old_checkpoints_go_but_never_the_one_that_the_job_is_in_or_came_from() -> None:
    saved = [
        replace(SAVED, name=f"gpt-{n}", uid=f"c{n}", serial=n, use=Use.RESTORED, completed_at=NOW - 100 + n)
        for n in range(1, 6)
    ]
    view = replace(RUNNING, checkpoints=tuple(saved), policy=Policy(retention=Retention(keep=2)))
    assert [action.checkpoint for action in due(view) if isinstance(action, a.Expire)] == ["gpt-1", "gpt-2", "gpt-3"]
    pods = tuple(replace(pod, incarnation=Incarnation("c2", 2), told=True) for pod in PODS)
    came = replace(view, pods=pods)
    assert [action.checkpoint for action in due(came) if isinstance(action, a.Expire)] == ["gpt-1", "gpt-3"]
    aged = replace(view, policy=Policy(retention=Retention(keep=9, ttl=97.0)))
    decision = decide(aged)
    assert [action.checkpoint for action in decision.actions if isinstance(action, a.Expire)] == [
        "gpt-1",
        "gpt-2",
        "gpt-3",
    ]
    assert decision.again == 1


def test_of_failed_attempts_the_last_one_is_kept() -> None:
    failed = [Checkpoint(f"gpt-{n}", f"c{n}", "j", Kind.RELEASE, n, failed=Failed(NOW - 500, "no")) for n in (1, 2, 3)]
    view = replace(RUNNING, checkpoints=tuple(failed))
    assert [action.checkpoint for action in due(view) if isinstance(action, a.Expire)] == ["gpt-1", "gpt-2"]


def test_a_namespace_keeps_within_its_bytes_by_its_oldest_checkpoints() -> None:
    def one(n: int, *, kept: bool = False) -> Stored:
        return Stored(f"c{n}", NOW + n, 10, kept)

    assert over_quota([one(3), one(1), one(2)], 30) == ([], True)
    assert over_quota([one(3), one(1), one(2)], 15) == (["c1", "c2"], True)
    assert over_quota([one(3, kept=True), one(1, kept=True), one(2)], 15) == (["c2"], False)
    assert [s.kept for s in stored(SUSPENDED)] == [True]


def test_ranks_whose_pods_are_gone_are_given_up() -> None:
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation())
    assert due(replace(with_checkpoint(ASKED, led), pods=PODS[:1])) == [a.Drive("gpt-1", "c1", lost=(1,))]


def test_the_end_of_an_operation_is_concluded_before_anything_else_is_decided() -> None:
    ended = replace(SAVED, operation=replace(RELEASED, concluded=False), published=False)
    assert due(with_checkpoint(ASKED, ended)) == [a.Conclude("gpt-1", "c1")]


def test_what_was_committed_is_published_also_while_other_things_are_due() -> None:
    assert due(replace(ASKED, checkpoints=(replace(SAVED, published=False),))) == [
        a.Publish("gpt-1"),
        a.SetGate(Suspend("gpt-1")),
    ]


def test_a_checkpoint_beside_the_training_is_taken_when_the_gang_runs_and_goes_on_though_a_suspend_is_asked_for() -> (
    None
):
    asked = Checkpoint("mine", "m", "j", Kind.CONTINUE)
    assert due(with_checkpoint(RUNNING, asked)) == [a.Begin("mine", 1, Kind.CONTINUE, PODS, ())]
    led = replace(asked, serial=1, operation=operation(Kind.CONTINUE))
    assert due(with_checkpoint(ASKED, led)) == [a.Drive("mine", "c1")]
    ended = with_checkpoint(replace(RUNNING, job=replace(JOB, finished=True)), asked)
    assert due(ended) == [a.Fail("mine", "the job has ended", "NotRunning")]


def test_a_checkpoint_that_is_deleted_is_let_go_once_nothing_goes_on_with_it() -> None:
    assert due(with_checkpoint(RUNNING, replace(SAVED, deleting=True))) == [a.LetGo("gpt-1")]
    led = Checkpoint("gpt-1", "c1", "j", Kind.RELEASE, 1, operation(), deleting=True)
    assert due(with_checkpoint(ASKED, led)) == [a.Drive("gpt-1", "c1", withdraw=True)]
