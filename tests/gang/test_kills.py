"""The agent is killed at every step, and so is what works for it. Before the decision training goes on in all ranks;
after it, what was recorded is carried out. Nothing stays frozen or locked, and the next checkpoint works."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gang.lab import Lab, until

from stasis.core.steps import Step
from stasis.errors import CheckpointFailed
from stasis.store.checkpoint import list_checkpoints

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]
SEEN: dict[str, Callable[[Lab], bool]] = {  # that a step is at work
    "in freeze": lambda one: bool(one.frozen()),
    "in capture": lambda one: bool(one.crius("dump")),
    "in store": lambda one: any(path.is_file() for path in Path(f"{one.folder}/store").rglob("*")),
}
UNDECIDED = ["quiesce", "freeze", "drain", "lock-network", "capture", "unlock-network", "store", *SEEN]


def points(names: list[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in SEEN else pytest.mark.slow) for name in names]


def killed(one: Lab, verb: str, point: str) -> None:
    """Kill the agent at a step or record, or as soon as it is seen to be in the midst of a step."""
    agent = one.agent(verb, "-" if point in SEEN else point)
    if point in SEEN:
        assert until(lambda: SEEN[point](one)), f"never {point}"
        agent.kill()
    text, _ = agent.communicate(timeout=60)
    assert agent.returncode == -signal.SIGKILL, text


def recovered(one: Lab) -> list[str]:
    agent = one.agent("recover")
    answer, _ = agent.communicate(timeout=60)
    return list(json.loads(answer))


@pytest.mark.parametrize("verb", ["suspend", pytest.param("checkpoint", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", points(UNDECIDED))
def test_killed_before_the_decision_training_goes_on(lab: MakeLab, verb: str, point: str) -> None:
    one = lab(env={"BALLAST": str(64 << 20)})
    one.progress()
    killed(one, verb, point)
    one.progress()  # by the guardians alone: no agent is there
    assert until(lambda: one.guardians() == [])  # also one that only stood by
    assert one.frozen() == []
    assert one.locked() == []
    assert recovered(one) == ["aborted"]
    assert not Path(f"{one.folder}/store").exists() or list_checkpoints(one.where) == []
    one.operator.suspend()
    one.operator.resume()
    one.progress()
    one.finish()


def test_killed_before_it_began_it_is_begun_again_or_given_up(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    killed(one, "checkpoint", "prepare")
    one.progress()
    assert recovered(one) in (["aborted"], ["continued"])
    one.progress()
    assert one.frozen() == []
    one.finish()


@pytest.mark.parametrize("point", ["commit", "release"])
def test_killed_after_the_decision_it_is_carried_out(lab: MakeLab, point: str) -> None:
    one = lab()
    one.progress()
    killed(one, "suspend", point)
    assert recovered(one) == ["released"]
    assert one.gang.wait(10) == {0: 143, 1: 143}
    one.operator.resume()
    one.progress()
    one.finish()


def test_a_killed_criu_aborts_and_training_goes_on(lab: MakeLab) -> None:
    one = lab(env={"BALLAST": str(200 << 20)})
    one.progress()
    agent = one.agent("suspend")
    assert until(lambda: one.kill_crius("dump")), "no CRIU seen"
    answer = json.loads(agent.communicate(timeout=60)[0])
    assert answer["error"] == "CheckpointFailed"
    assert "killed" in answer["message"]
    one.progress()
    assert one.locked() == []
    one.operator.suspend()
    one.operator.resume()
    one.progress()
    one.finish()


@pytest.mark.parametrize("when", ["stands by", "holds a freeze"])
def test_a_killed_guardian_is_replaced(lab: MakeLab, when: str) -> None:
    one = lab(env={"BALLAST": str(200 << 20)})
    one.progress()
    agent = one.agent("suspend")
    assert until(lambda: bool(one.frozen() if when == "holds a freeze" else one.guardians())), "no guardian seen"
    first = one.guardians()[0]
    os.kill(first, signal.SIGKILL)
    assert json.loads(agent.communicate(timeout=60)[0]) == "released"
    one.operator.resume()
    one.progress()
    assert one.frozen() == []
    one.finish()


def test_a_full_disk_aborts_cleanly(lab: MakeLab, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", small], check=True)
    try:
        one = lab(env={"BALLAST": str(64 << 20)}, where=f"{small}/store:test")
        one.progress()
        with pytest.raises(CheckpointFailed, match=r"full|space"):
            one.operator.suspend()
        one.progress()
        assert one.frozen() == []
        subprocess.run(["mount", "-o", "remount,size=400m", small], check=True)
        one.operator.suspend()
        one.operator.resume()
        one.progress()
        one.finish()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_withdrawn_container_aborts_the_others(lab: MakeLab) -> None:
    """A rank that dies during the checkpoint: the others go on, as they would have without it."""
    one = lab()
    one.progress()
    one.gang.places[1].container.kill("KILL")
    one.gang.places[1].container.wait(10)
    with pytest.raises(CheckpointFailed, match=r"nothing to checkpoint|ended"):
        one.operator.suspend()
    assert one.frozen() == []
    assert one.gang.statuses()[0] != 143  # not released


def test_every_step_is_killed_at() -> None:
    """The list of points names every step before the vote that does something on a CPU job."""
    assert {Step.FREEZE, Step.DRAIN, Step.LOCK_NETWORK, Step.CAPTURE, Step.UNLOCK_NETWORK, Step.STORE} <= {*UNDECIDED}
