"""Whatever goes wrong with a device at whatever step: training goes on in all ranks, unlocked, or a restore fails with
a clear cause and can be repeated."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gang.lab import until
from tests.gpusim.conftest import MakeGang
from tests.gpusim.lab import GpuLab

from stasis.agent import cgroups
from stasis.agent.cuda.driver import State
from stasis.core.plan import Timing
from stasis.core.steps import Step
from stasis.errors import CheckpointFailed, Refused, ResourceShort, RestoreFailed

pytestmark = [pytest.mark.root, pytest.mark.criu]

RUNNING = [State.RUNNING] * 2
SHORT = {Step.LOCK_DEVICES: 2.0, Step.SAVE_DEVICES: 2.0}  # seconds
TIMING = Timing(
    frozen=60.0, prepared=60.0, storing=120.0, step=60.0, lease=1.0, takeover=1.0, margin=1.0, resend=0.2, limits=SHORT
)


def goes_on(one: GpuLab) -> None:
    """And the next checkpoint works."""
    assert one.states() == RUNNING
    assert (one.frozen(), one.locked()) == ([], [])
    one.progress()
    one.machine.faults()
    one.operator.suspend()
    one.operator.resume()
    one.progress()
    one.finish()


@pytest.mark.slow
def test_checkpoints_while_training_goes_on(gangs: MakeGang) -> None:
    one = gangs()
    for _ in range(3):
        one.progress()
        one.operator.checkpoint()
        assert one.states() == RUNNING
    goes_on(one)


LATE = {"delay_ms": 4000}
FAULTS = [
    pytest.param("lock", {"error": 600}, "device not ready", marks=pytest.mark.slow),
    ("lock", LATE, "no answer after"),
    pytest.param("lock", {"idle": True}, "running, not locked", marks=pytest.mark.slow),
    pytest.param("checkpoint", {"error": 2}, "out of memory", marks=pytest.mark.slow),
    pytest.param("checkpoint", LATE, "no answer after", marks=pytest.mark.slow),
    pytest.param("checkpoint", {"idle": True}, "locked, not checkpointed", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("verb", ["suspend", pytest.param("checkpoint", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("op", "fault", "text"), FAULTS)
def test_a_fault_of_one_rank_before_the_freeze(
    gangs: MakeGang, verb: str, op: str, fault: dict[str, object], text: str
) -> None:
    one = gangs(timing=TIMING)
    one.progress()
    one.machine.faults({"op": op, "pid": one.cuda(1), "times": 1, **fault})
    with pytest.raises(CheckpointFailed, match=text):
        getattr(one.operator, verb)()
    goes_on(one)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"error": 2}, {"idle": True}])
@pytest.mark.parametrize("op", ["restore", "unlock"])
def test_a_fault_after_the_thaw_is_tried_again(gangs: MakeGang, op: str, fault: dict[str, object]) -> None:
    one = gangs()
    one.progress()
    one.machine.faults({"op": op, "pid": one.cuda(1), "times": 1, **fault})
    with pytest.raises(CheckpointFailed):
        one.operator.checkpoint()
    goes_on(one)


@pytest.mark.slow
def test_a_process_that_fails_keeps_no_other_rank(gangs: MakeGang) -> None:
    """It ends by itself; the gang is one that has lost a rank."""
    one = gangs()
    one.progress()
    one.machine.faults({"op": "checkpoint", "pid": one.cuda(1), "error": 999, "state": 3, "times": 1})
    with pytest.raises(CheckpointFailed, match="unknown error"):
        one.operator.suspend()
    assert one.gang.places[1].container.wait(10) == 1
    assert any("CUDA error 999" in line for line in one.gang.lines[1])


# ---------------------------------------------------------------- at a restore


def suspended(one: GpuLab) -> None:
    one.progress()
    one.operator.suspend()
    one.gang.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["restore", "unlock"])
def test_a_restore_tries_again(gangs: MakeGang, op: str) -> None:
    one = gangs()
    suspended(one)
    one.machine.faults({"op": op, "error": 2, "times": 1})
    one.operator.resume()
    goes_on(one)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"op": "restore", "error": 2}, "out of memory"),
        pytest.param(
            {"op": "restore", "error": 999, "state": 3}, "is failed after the restore", marks=pytest.mark.slow
        ),
        pytest.param({"op": "unlock", "error": 304}, "OS call failed", marks=pytest.mark.slow),
    ],
)
def test_a_restore_that_fails_can_be_repeated(gangs: MakeGang, fault: dict[str, object], text: str) -> None:
    one = gangs()
    suspended(one)
    one.machine.faults(fault)
    with pytest.raises(RestoreFailed, match=text):
        one.operator.resume()
    one.machine.faults()
    one.operator.resume()
    goes_on(one)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["dead", "content", "one"])
def test_a_device_that_comes_back_damaged_ends_the_training(gangs: MakeGang, damage: str) -> None:
    """No driver says so: the program must, and this one does, with the means of these tests."""
    one = gangs()
    suspended(one)
    one.machine.faults({"op": "restore", "damage": damage})
    one.operator.resume()
    assert until(lambda: 1 in one.gang.statuses().values(), 10.0)


GPUS: dict[str, tuple[list[int | None], str]] = {
    "another model": ([2, 1], "the checkpoint needs 1 x NVIDIA H100, the container has 1 x NVIDIA A100"),
    "none": ([0, None], "the checkpoint needs 1 x NVIDIA H100, the container has none"),
}


@pytest.mark.parametrize("case", ["another model", pytest.param("none", marks=pytest.mark.slow)])
def test_other_gpus_are_refused_before_anything_runs(gangs: MakeGang, case: str) -> None:
    gpus, text = GPUS[case]
    one = gangs(["H100", "H100", "A100"])
    one.progress()
    one.give(gpus)
    files = one.suspend_into_placeholders()
    with pytest.raises(Refused, match=text):
        one.operator.restore()
    assert one.not_waiting(files) == []
    one.give([0, 1])
    one.operator.resume()
    goes_on(one)


# ---------------------------------------------------------------- refused before anything is locked


def test_without_the_device_steps_it_is_refused(gangs: MakeGang) -> None:
    one = gangs()
    one.progress()
    node = one.operator.agent.node.hardware
    node.proc = Path("/nonexistent")
    with pytest.raises(Refused, match="an NVIDIA GPU is in use"):
        one.operator.suspend()
    node.proc = one.machine.folder / "proc"
    assert one.states() == RUNNING
    one.progress()


@pytest.mark.slow
def test_a_forked_child_is_refused(gangs: MakeGang) -> None:
    one = gangs(env={"FORK": "1"})
    one.progress()
    with pytest.raises(Refused, match=r"inherited a GPU .* spawn or forkserver"):
        one.operator.suspend()
    assert one.states() == RUNNING
    one.progress()


@pytest.mark.slow
def test_a_memory_limit_without_room_is_refused(gangs: MakeGang) -> None:
    one = gangs(env={"GPU_PAGES": "8192"})
    one.progress()
    limited(one, 1, 16 << 20)
    with pytest.raises(ResourceShort, match=r"\d+ MiB of GPU memory .* whose limit leaves \d+ MiB"):
        one.operator.suspend()
    limited(one, 1, 256 << 20)
    goes_on(one)


def limited(one: GpuLab, rank: int, more: int) -> None:
    """Let a rank's container have so much more memory than it uses."""
    pid1 = one.gang.places[rank].container.pid1
    group = f"{cgroups.hierarchies()['memory']}{cgroups.membership(pid1)['memory']}"
    with open(f"{group}/memory.usage_in_bytes") as usage:
        limit = int(usage.read()) + more
    with open(f"{group}/memory.limit_in_bytes", "w") as file:
        file.write(str(limit))


# ---------------------------------------------------------------- the agent is killed


SEEN: dict[str, Callable[[GpuLab], bool]] = {
    "in lock": lambda one: State.LOCKED in one.states(),
    "in save": lambda one: State.CHECKPOINTED in one.states(),
}


POINTS = ["lock-devices", "save-devices", "freeze", "capture", "store", "in lock"]


@pytest.mark.parametrize("verb", ["suspend", pytest.param("checkpoint", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", ["in save", *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS)])
def test_an_agent_killed_while_devices_are_held(gangs: MakeGang, verb: str, point: str) -> None:
    one = gangs(env={"GPU_PAGES": "8192"}, bandwidth="80:80")
    one.progress()
    if point in SEEN:
        agent = one.agent(verb)
        assert until(lambda: SEEN[point](one)), f"never {point}"
        agent.kill()
    else:
        agent = one.agent(verb, point)
    assert agent.communicate(timeout=60)[0] == ""
    assert agent.returncode == -signal.SIGKILL
    one.progress()  # by the guardians alone: no agent is there
    assert one.states() == RUNNING
    recovered = one.agent("recover").communicate(timeout=60)[0]
    assert json.loads(recovered) == ["aborted"]
    goes_on(one)


LATER = [pytest.param(point, marks=pytest.mark.slow) for point in ("thaw", "restore-devices", "rebuild")]


@pytest.mark.parametrize("point", ["unlock-devices", *LATER])
def test_an_agent_killed_amid_a_restore(gangs: MakeGang, point: str) -> None:
    """Once it is decided that the gang runs, the next agent brings its devices back."""
    one = gangs()
    one.progress()
    one.suspend_into_placeholders()
    agent = one.agent("restore", point)
    assert agent.communicate(timeout=60)[0] == ""
    assert json.loads(one.agent("recover").communicate(timeout=60)[0]) == ["restored"]
    goes_on(one)
