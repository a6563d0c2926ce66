"""The rule of the gate, on a model and on the gate's own threads."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stasis_trainer.cut import Cut
from stasis_trainer.gate import Busy, Gate
from stasis_trainer.messages import Phase, State
from tests.collectives import model


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 2**32))
def test_every_cut_closes_consistently_and_the_programs_go_on(seed: int) -> None:
    gang = model.Gang.of(seed, model.owes_anywhere)
    gang.run_to_trigger()
    assert gang.checkpoint()
    assert gang.finish()


def test_passing_only_what_is_owed_in_the_same_channel_deadlocks() -> None:
    def closes(seed: int, rule: model.Rule) -> bool:
        gang = model.Gang.of(seed, rule)
        gang.run_to_trigger()
        return gang.checkpoint()

    stuck = [seed for seed in range(300) if not closes(seed, model.owes_here)]
    assert len(stuck) > 10
    assert all(closes(seed, model.owes_anywhere) for seed in stuck)


def test_an_armed_gate_parks_who_owes_nothing_until_a_peer_is_ahead() -> None:
    gate, passed = Gate(), threading.Event()
    gate.ended(gate.enter("group 0", [0, 1]))
    gate.arm()

    def operate() -> None:
        gate.ended(gate.enter("group 1", [0, 1]))
        passed.set()

    thread = threading.Thread(target=operate)
    thread.start()
    assert not passed.wait(0.1)
    assert gate.state().parked == ["group 1"]
    gate.set_targets({"group 0": 1})
    assert not passed.wait(0.1)
    gate.set_targets({"group 0": 2})  # not of the channel at the gate, and yet it has to go there
    assert passed.wait(5)
    thread.join()
    assert gate.state().counts == {"group 0": 1, "group 1": 1}


def test_a_gate_does_not_commit_while_an_operation_runs_or_is_owed() -> None:
    gate = Gate()
    ticket = gate.enter("group 0", [0, 1])
    gate.arm()
    with pytest.raises(Busy):
        gate.commit()
    gate.ended(ticket)
    gate.set_targets({"group 0": 2})
    with pytest.raises(Busy):
        gate.commit()
    gate.set_targets({"group 0": 1})
    gate.commit()
    assert gate.phase is Phase.COMMITTED


def test_a_committed_gate_holds_brief_calls_until_it_opens() -> None:
    gate, called = Gate(), threading.Event()
    gate.arm()
    with gate.brief_call():
        pass
    gate.commit()

    def call() -> None:
        with gate.brief_call():
            called.set()

    thread = threading.Thread(target=call)
    thread.start()
    assert not called.wait(0.1)
    with gate.bypass(), gate.brief_call():
        pass
    gate.open()
    assert called.wait(5)
    thread.join()


def test_a_commit_waits_for_a_brief_call_that_is_under_way() -> None:
    gate, begun = Gate(), threading.Event()
    gate.arm()

    def call() -> None:
        with gate.brief_call():
            begun.set()
            time.sleep(0.2)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    gate.commit()
    assert not thread.is_alive() or gate.state().brief_calls == 0
    thread.join()


def test_a_gate_does_not_commit_what_was_refused_while_it_was_armed() -> None:
    gate = Gate()
    gate.arm()
    gate.refuse("recv_anysource")
    with pytest.raises(Busy, match="recv_anysource"):
        gate.commit()


def test_nothing_is_refused_while_groups_are_torn_down() -> None:
    """The thread waits until they are back, and then fails the next checkpoint."""
    gate = Gate()
    gate.arm()
    gate.commit()
    thread = threading.Thread(target=gate.refuse, args=["recv_anysource"])
    thread.start()
    time.sleep(0.1)
    assert gate.refused == []
    gate.open()
    thread.join(5)
    assert gate.refused == ["recv_anysource"]


def test_a_debt_names_rank_operation_and_group() -> None:
    cut = Cut(["a", "b"])
    cut.observe("a", State(0, {"group 3": 6}, {"group 3": [0, 1]}))
    assert not cut.to_send()  # before both were heard
    cut.observe("b", State(1, {"group 3": 7}, {"group 3": [0, 1]}, ["group 3"]))
    assert [str(debt) for debt in cut.debts()] == ["rank 0 owes operation 7 of group 3"]
    assert cut.busy() == ["rank 1 is within an operation of group 3"]
    assert not cut.closed
    assert cut.to_send() == {"a": {"group 3": 7}, "b": {"group 3": 7}}
    assert not cut.to_send()


def test_a_cut_does_not_close_without_every_member_of_a_channel() -> None:
    cut = Cut(["a"])
    cut.observe("a", State(0, {"group 0": 1}, {"group 0": [0, 1]}))
    assert not cut.closed
    assert [debt.rank for debt in cut.debts()] == [1]


def test_who_has_no_rank_yet_owes_the_init_that_others_are_in() -> None:
    cut = Cut(["a", "b"])
    cut.observe("a", State(0, {"init": 1}, {"init": [0, 1]}, ["init"]))
    cut.observe("b", State(None))
    assert cut.to_send()["b"] == {"init": 1}
    assert [str(debt) for debt in cut.debts()] == ["rank 1 owes init_process_group number 1"]


def test_a_helper_without_a_rank_owes_nothing_once_all_ranks_have_joined() -> None:
    cut = Cut(["agent", "a"])
    cut.observe("agent", State(None))
    cut.observe("a", State(0, {"init": 1}, {"init": [0]}))
    assert cut.closed
    assert cut.to_send() == {"a": {"init": 1}}
