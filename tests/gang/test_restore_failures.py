"""A restore that fails, or whose agent is killed, at any step. Before its record the placeholders are as they were;
after it, the gang goes on. Never is half a gang running, and the checkpoint can be restored again."""

import json
import signal
import subprocess
from collections.abc import Callable

import pytest
from tests.gang.lab import Lab, until

from stasis.core.plan import PLANS, VOTES, Kind
from stasis.errors import RestoreFailed

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]
UNDECIDED = ["lay", "in lay", "restore", "in restore", "release-network", "poke-network"]
SOME = ["in restore", "poke-network"]
DECIDED = ["restored", "thaw", "restore-devices", "rebuild"]


def killed(one: Lab, verb: str, point: str) -> None:
    """Kill the agent at a step or record, or as soon as it is seen to be in the midst of a step."""
    agent = one.agent(verb, "-" if point.startswith("in ") else point)
    if point == "in lay":
        assert until(lambda: any(one.gang.folder.with_name("gang.state").glob("laid-*")))
        agent.kill()
    elif point == "in restore":
        assert until(lambda: bool(one.crius("restore")))
        agent.kill()
    text, _ = agent.communicate(timeout=100)
    assert agent.returncode == -signal.SIGKILL, text


def answer(one: Lab, verb: str) -> object:
    agent = one.agent(verb)
    text, _ = agent.communicate(timeout=100)
    return json.loads(text)


def write_files(one: Lab) -> None:
    """What a restore has to lay, and to remove again when it fails."""
    for place in one.gang.places.values():
        script = "mkdir -p /opt/made/deep && echo a >/opt/made/deep/a && echo b >/dev/shm/b"
        subprocess.run(["runc", "exec", place.container.id, "sh", "-c", script], check=True)


@pytest.mark.parametrize(
    "points", [pytest.param(UNDECIDED, marks=pytest.mark.slow, id="all"), pytest.param(SOME, id="some")]
)
@pytest.mark.parametrize("translate", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kept", "translated"])
def test_killed_before_the_record_the_placeholders_wait(lab: MakeLab, points: list[str], translate: bool) -> None:
    one = lab(env={"BALLAST": str(32 << 20)})
    write_files(one)
    one.progress()
    files = one.suspend_into_placeholders(new_addresses=translate)
    for point in points:
        killed(one, "restore", point)
        if point.endswith("-network"):
            assert one.frozen() == list(one.gang.places)  # what was restored waits for an agent
        killed(one, "recover", "lay")  # a second attempt had begun, the first one is undone
        assert one.not_waiting(files) == []
        assert answer(one, "recover") == ["abandoned"]
        assert one.not_waiting(files) == []
    one.operator.restore()
    one.progress()
    one.finish()


@pytest.mark.parametrize("point", [pytest.param("place", marks=pytest.mark.slow), "in lay", "release-network"])
def test_a_restarted_agent_tries_again(lab: MakeLab, point: str) -> None:
    one = lab()
    write_files(one)
    one.progress()
    one.suspend_into_placeholders()
    killed(one, "restore", point)
    assert answer(one, "recover") == ["restored"]
    one.progress()
    one.finish()


@pytest.mark.slow
def test_killed_before_the_record_fresh_placeholders_do_as_well(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    one.suspend_into_placeholders()
    killed(one, "restore", "poke-network")
    killed(one, "recover", "lay")
    assert answer(one, "recover") == ["abandoned"]
    one.operator.resume(new_addresses=True)
    one.progress()
    one.finish()


@pytest.mark.parametrize("point", [p if p == "restored" else pytest.param(p, marks=pytest.mark.slow) for p in DECIDED])
def test_killed_after_the_record_training_goes_on(lab: MakeLab, point: str) -> None:
    """Also the next suspension, by an agent that knows of the restore only what is written down."""
    one = lab()
    one.progress()
    one.suspend_into_placeholders(new_addresses=True)
    killed(one, "restore", point)
    assert answer(one, "recover") == ["restored"]
    one.progress()
    one.operator.suspend()
    one.operator.resume(new_addresses=True)
    one.progress()
    one.finish()


def test_a_killed_criu_is_tried_again_once(lab: MakeLab) -> None:
    one = lab(env={"BALLAST": str(100 << 20)})
    one.progress()
    files = one.suspend_into_placeholders()
    agent = one.agent("restore")
    assert until(lambda: one.kill_crius("restore")), "no CRIU seen"
    while agent.poll() is None:
        one.kill_crius("restore")
    text = json.loads(agent.communicate()[0])
    assert text["error"] == "RestoreFailed"
    assert "killed" in text["message"]
    assert one.not_waiting(files) == []
    agent = one.agent("restore")
    assert until(lambda: one.kill_crius("restore")), "no CRIU seen"
    assert json.loads(agent.communicate(timeout=60)[0]) == "restored"
    one.progress()
    one.finish()


@pytest.mark.parametrize(
    "step",
    ["restore", pytest.param("lay", marks=pytest.mark.slow), pytest.param("poke-network", marks=pytest.mark.slow)],
)
def test_a_placeholder_that_is_deleted_keeps_the_others_from_running(lab: MakeLab, step: str) -> None:
    one = lab()
    one.progress()
    files = one.suspend_into_placeholders()
    one.on_stage = lambda what: one.gang.places[1].container.delete() if what == step else None
    with pytest.raises(RestoreFailed, match="rank 1"):
        one.operator.restore()
    one.on_stage = lambda what: None
    assert one.processes(0) == []
    assert one.files(0) == files[0]
    assert one.frozen() == []
    one.operator.resume()
    one.progress()
    one.finish()


def test_every_step_is_killed_at() -> None:
    plan = [stage.step for stage in PLANS[Kind.RESTORE]]
    named = {point.removeprefix("in ") for point in UNDECIDED}
    assert named | {"place"} == set(plan[: VOTES[Kind.RESTORE] + 1])
