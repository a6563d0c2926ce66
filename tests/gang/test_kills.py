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
UNDECIDED = ["prepare", "freeze", "freeze+0.3", "lock-network", "capture", "capture+0.1", "unlock-network", "store"]
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
    assert until(lambda: kill_by_name("criu", "dump")), "no CRIU seen"
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
    assert until(lambda: kill_by_name("stasis-guardian", one.name)), "no guardian seen"
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
    with pytest.raises(CheckpointFailed, match="rank 1"):
        one.operator.suspend()
    assert one.frozen() == []
    assert one.gang.statuses()[0] != 143


def until(done: Callable[[], bool], timeout: float = 30.0) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.001)
    return False


def kill_by_name(name: str, argument: str) -> bool:
    """SIGKILL the first process of that name whose command line holds the argument, if there is one."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            comm = (folder / "comm").read_text().strip()
        except OSError:
            continue
        if name in (comm, Path(command[0]).name, *(Path(part).name for part in command[3:4])) and any(
            argument in part for part in command
        ):
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
            return True
    return False


def test_every_step_is_killed_at() -> None:
    """The list of points names every step before the vote that does something on a CPU job."""
    named = {point.partition("+")[0] for point in UNDECIDED}
    assert named >= {Step.PREPARE, Step.FREEZE, Step.LOCK_NETWORK, Step.CAPTURE, Step.UNLOCK_NETWORK, Step.STORE}
