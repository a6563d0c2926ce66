"""The agent is killed at every step, and so is what works for it. Before the decision training goes on in all ranks;
after it, what was recorded is carried out. Nothing stays frozen or locked, and the next checkpoint works."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gang.lab import Lab

from stasis.core.steps import Step
from stasis.errors import CheckpointFailed
from stasis.store.checkpoint import list_checkpoints

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]
UNDECIDED = ["quiesce", "freeze", "freeze+0.3", "lock-network", "capture", "capture+0.1", "unlock-network", "store"]
SOME = {"freeze+0.3", "capture+0.1", "store"}


def points(names: list[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in names]


def killed(one: Lab, verb: str, point: str) -> None:
    agent = one.agent(verb, point)
    assert agent.wait(60) == -signal.SIGKILL
    agent.communicate()


def recovered(one: Lab) -> list[str]:
    agent = one.agent("recover")
    answer, _ = agent.communicate(timeout=60)
    return list(json.loads(answer))


@pytest.mark.parametrize("verb", ["suspend", pytest.param("checkpoint", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", points(UNDECIDED))
def test_killed_before_the_decision_training_goes_on(lab: MakeLab, verb: str, point: str) -> None:
    one = lab()
    one.progress()
    killed(one, verb, point)
    one.progress()  # by the guardians alone: no agent is there
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
    assert until(lambda: kill_criu(one)), "no CRIU seen"
    answer = json.loads(agent.communicate(timeout=60)[0])
    assert answer["error"] == "CheckpointFailed"
    assert "killed" in answer["message"]
    one.progress()
    assert one.locked() == []
    one.operator.suspend()
    one.operator.resume()
    one.progress()
    one.finish()


def test_a_killed_guardian_is_replaced_or_the_checkpoint_given_up(lab: MakeLab) -> None:
    one = lab(env={"BALLAST": str(100 << 20)})
    one.progress()
    agent = one.agent("suspend")
    assert until(lambda: kill_guardian(one)), "no guardian seen"
    answer = json.loads(agent.communicate(timeout=60)[0])
    if answer == "released":
        one.operator.resume()
    else:
        assert answer["error"] == "CheckpointFailed"
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


def until(done: Callable[[], bool], timeout: float = 30.0) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.001)
    return False


def kill_criu(one: Lab) -> bool:
    """SIGKILL a CRIU in one of the gang's containers, if there is one."""
    spaces = {os.readlink(f"/proc/{place.container.pid1}/ns/pid") for place in one.gang.places.values()}
    return kill(lambda f: b"/criu\0dump\0" in (f / "cmdline").read_bytes() and os.readlink(f / "ns/pid") in spaces)


def kill_guardian(one: Lab) -> bool:
    def guards(folder: Path) -> bool:
        if (folder / "comm").read_text() != "stasis-guardian\n":
            return False
        return str(one.folder) in (folder / "cmdline").read_text()

    return kill(guards)


def kill(wanted: Callable[[Path], bool]) -> bool:
    """SIGKILL the first process of which that is true."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted(folder):
                os.kill(int(folder.name), signal.SIGKILL)
                return True
        except (OSError, ValueError):
            continue  # gone meanwhile
    return False


def test_every_step_is_killed_at() -> None:
    """The list of points names every step before the vote that does something on a CPU job."""
    named = {point.partition("+")[0] for point in UNDECIDED}
    assert named >= {Step.FREEZE, Step.LOCK_NETWORK, Step.CAPTURE, Step.UNLOCK_NETWORK, Step.STORE}
