"""A gang is suspended and resumed by orders over the daemon's connection, as in a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.daemon.lab import Lab, until

from stasis.core.plan import Outcome

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]


def test_suspend_and_resume(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    operation = one.checkpoint()
    assert until(lambda: one.held() == [0, 1] or operation.ended.is_set()), one.daemon.tail()
    assert one.frozen() == [0, 1]  # alive until kubelet says that their pods end
    assert one.gang.statuses() == {0: None, 1: None}
    answers: dict[int, str] = {}
    hooks = [threading.Thread(target=lambda r=rank: answers.update({r: one.prestop(r)})) for rank in (0, 1)]
    for rank, hook in enumerate(hooks):
        one.terminate(rank)
        hook.start()
    for rank, hook in enumerate(hooks):
        hook.join(30)
        one.finish_pod(rank)
    assert answers == {0: "released", 1: "released"}
    assert operation.outcome() is Outcome.RELEASED, operation.failures()
    one.forget(operation)
    one.replace()
    restore = one.restore()
    assert restore.outcome() is Outcome.RESTORED, (restore.failures(), one.daemon.tail())
    one.progress()
    one.forget(restore)
