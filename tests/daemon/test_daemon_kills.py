"""The daemon is killed and started again, as kubelet does, at one moment after the other: what is decided is carried
out, what is not is given up, and nothing stays frozen or behind."""

from __future__ import annotations

import signal
import threading
import urllib.error
from collections.abc import Callable

import pytest
from tests.daemon.controller import Operation
from tests.daemon.lab import Lab
from tests.daemon.process import GONE, until

from stasis.core import machine as m
from stasis.core.plan import Outcome, Timing
from stasis.core.records import Verdict
from stasis.core.steps import Step

pytestmark = [pytest.mark.root, pytest.mark.criu]

SOON = Timing(frozen=8.0, prepared=60.0, storing=60.0, step=60.0, lease=1.0, takeover=1.0, margin=1.0, poll=0.5)
MakeLab = Callable[..., Lab]


def kill_at(one: Lab, operation: Operation, due: Callable[[m.Notice], bool]) -> None:
    """Kill the daemon in the moment of a notice, before its coordinator goes on."""
    killed = threading.Event()

    def notify(notice: m.Notice) -> None:
        if not killed.is_set() and due(notice):
            one.daemon.kill()
            killed.set()

    operation.on_notice = notify
    assert killed.wait(GONE), operation.notices


@pytest.mark.parametrize("step", [Step.DRAIN, Step.CAPTURE, Step.STORE])
def test_before_the_vote_training_goes_on(lab: MakeLab, step: Step) -> None:
    one = lab()
    one.progress()
    operation = one.checkpoint()
    kill_at(one, operation, lambda notice: isinstance(notice, m.StageBegun) and notice.stage.step is step)
    one.progress()  # by the guardians alone: no daemon is there
    one.daemon.start()
    assert operation.outcome() is Outcome.ABORTED
    assert (one.frozen(), one.locked()) == ([], [])
    one.forget(operation)
    one.progress()


def test_after_the_decision_it_is_carried_out(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    operation = one.checkpoint()
    kill_at(one, operation, lambda n: isinstance(n, m.Recorded) and n.record.verdict is Verdict.COMMIT)
    assert until(lambda: one.record(f"{operation.spec.op}/release"))
    assert one.frozen() == [0, 1]
    one.daemon.start()
    assert until(lambda: one.held() == [0, 1]), one.daemon.tail()
    assert one.frozen() == [0, 1]
    assert one.end_pods() == {0: "released", 1: "released"}
    assert operation.outcome() is Outcome.RELEASED
    one.forget(operation)
    one.resume()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_while_released_trees_wait_for_their_pods(lab: MakeLab, how: signal.Signals) -> None:
    one = lab()
    one.progress()
    operation = one.begin_suspend()
    one.terminate(0)
    asked = threading.Thread(target=_ask, args=(one, 0))
    asked.start()  # in vain: it may be answered or not
    assert one.daemon.process is not None
    one.daemon.process.send_signal(how)
    one.daemon.process.wait(GONE)
    asked.join(GONE)
    one.daemon.start()
    one.finish_pod(0)  # though its hook does not ask again
    assert one.frozen() == [1]
    one.terminate(1)
    assert one.prestop(1) == "released"
    one.finish_pod(1)
    assert operation.outcome() is Outcome.RELEASED
    one.forget(operation)


def _ask(one: Lab, rank: int) -> None:
    try:
        one.prestop(rank)
    except (urllib.error.URLError, ConnectionError):
        pass


@pytest.mark.parametrize("step", [Step.RESTORE, Step.THAW])
def test_in_a_restore(lab: MakeLab, step: Step) -> None:
    one = lab()
    one.progress()
    operation = one.begin_suspend()
    one.end_pods()
    assert operation.outcome() is Outcome.RELEASED
    one.replace()
    restore = one.restore()
    kill_at(one, restore, lambda notice: isinstance(notice, m.StageBegun) and notice.stage.step is step)
    one.daemon.start()
    assert restore.outcome() is Outcome.RESTORED, restore.failures()
    one.progress()
    one.forget(restore)


def test_a_checkpoint_that_is_deleted_in_mid_operation_lets_training_go_on(lab: MakeLab) -> None:
    """Nobody can ever decide it: the ranks do not wait for that."""
    one = lab()
    one.progress()
    operation = one.checkpoint(timing=SOON)
    kill_at(one, operation, lambda notice: isinstance(notice, m.StageBegun) and notice.stage.step is Step.STORE)
    one.delete_checkpoint()
    one.daemon.start()
    one.progress()
    assert (one.frozen(), one.locked()) == ([], [])
    assert operation.outcome() is Outcome.ABORTED
    one.daemon.restart()
    assert until(lambda: not one.left(operation.spec.op)), one.left(operation.spec.op)
