"""The four steps over all CUDA processes of a tree: what is begun is undone, whatever became of the calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.gpusim.conftest import MakeMachine
from tests.gpusim.machine import UUIDS, Machine, Program, dashed

from stasis.agent.cuda import devices, preflight
from stasis.agent.cuda.devices import Devices
from stasis.agent.cuda.driver import CudaError, GivenUp, Patience, State
from stasis.agent.cuda.hardware import Gpu, Hardware
from stasis.agent.cuda.placing import Saved, place
from stasis.errors import CheckpointFailed, Corrupt, Refused, ResourceShort

pytestmark = pytest.mark.root

Make = Callable[[], Devices]


@pytest.fixture(params=["api", pytest.param("cli", marks=pytest.mark.slow)])
def hardware(machine: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Hardware]:
    for name, value in {**machine.env, "STASIS_CUDA_DRIVER": request.param}.items():
        monkeypatch.setenv(name, value)
    one = Hardware()
    yield one
    one.close()


@pytest.fixture
def make(hardware: Hardware, tmp_path: Path) -> Iterator[Make]:
    """Each as another agent's, with what the ones before it have noted."""
    made: list[Devices] = []

    def make_one() -> Devices:
        made.append(Devices(hardware, tmp_path / "note"))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def state(hardware: Hardware, one: Program) -> State:
    return hardware.driver().state(one.pid, Patience(5.0))


def undo(one: Devices, seconds: float = 20.0) -> int:
    """As a rank that gives up: until nothing can happen any more. Returns how often it was looked at."""
    end, looks = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        looks += 1
        try:
            again = [one.restore().get("unsettled"), one.unlock().get("unsettled")]
        except CudaError:
            again = [True]
        if not any(again):
            return looks
        time.sleep(0.2)
    raise AssertionError("never undone")


def test_lock_save_restore_unlock(machine: Machine, hardware: Hardware, make: Make) -> None:
    with machine.program("spawn") as tree:
        one = make()
        one.lock(tree.pid)
        assert len(one.processes) == 2
        assert tree.still()
        one.save(tree.pid)
        one.save(tree.pid)  # each step can be repeated
        assert one.restore() == {}
        assert one.unlock() == {}
        assert one.unlock() == {}
        one.forget()
        tree.wait_for(3)


def test_one_process_that_cannot_be_locked_is_undone_with_the_others(
    machine: Machine, hardware: Hardware, make: Make
) -> None:
    with machine.program("spawn") as tree:
        child = int(open(f"/proc/{tree.pid}/task/{tree.pid}/children").read())
        machine.faults({"op": "lock", "pid": child, "error": 600, "times": 1})
        one = make()
        with pytest.raises(CudaError, match="device not ready"):
            one.lock(tree.pid)
        assert undo(one) == 1
        assert state(hardware, tree) is State.RUNNING
        tree.wait_for(3)


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_call_that_was_given_up_is_undone_when_it_happens(
    machine: Machine, hardware: Hardware, make: Make, step: str
) -> None:
    with machine.program() as tree:
        machine.faults({"op": step, "delay_ms": 2500, "times": 1})
        one = make()
        assert state(hardware, tree) is State.RUNNING  # what asks the driver is there
        if step == "checkpoint":
            one.lock(tree.pid)
        threading.Timer(0.5, one.give_up).start()
        with pytest.raises(GivenUp):
            one.lock(tree.pid)
            one.save(tree.pid)
        assert state(hardware, tree) is (State.RUNNING if step == "lock" else State.LOCKED)
        assert undo(one) == 2
        assert state(hardware, tree) is State.RUNNING
        time.sleep(0.5)
        assert state(hardware, tree) is State.RUNNING
        tree.wait_for(3)


@pytest.mark.parametrize("step", ["lock", "save"])
def test_another_agent_undoes_what_one_has_begun(machine: Machine, hardware: Hardware, make: Make, step: str) -> None:
    with machine.program() as tree:
        first = make()
        first.lock(tree.pid)
        if step == "save":
            first.save(tree.pid)
        second = make()
        undo(second)
        second.forget()
        tree.wait_for(3)
        assert make().processes == ()


def test_a_driver_that_never_answers_keeps_nobody_for_ever(
    machine: Machine, hardware: Hardware, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(devices, "UNSETTLED_SECONDS", 1.0)
    with machine.program() as tree:
        assert state(hardware, tree) is State.RUNNING  # what asks the driver is there
        machine.faults({"op": "lock", "hang": True})
        one = make()
        threading.Timer(0.3, one.give_up).start()
        with pytest.raises(GivenUp):
            one.lock(tree.pid)
        assert undo(one) > 2
        tree.wait_for(3)


@pytest.mark.parametrize("op", ["lock", "checkpoint", "restore", "unlock"])
def test_an_answer_is_not_believed(machine: Machine, make: Make, op: str) -> None:
    """Exit code 0, and nothing done."""
    with machine.program() as tree:
        machine.faults({"op": op, "idle": True, "times": 1})
        one = make()
        with pytest.raises((CheckpointFailed, CudaError), match=r"though (no|the) call was"):
            one.lock(tree.pid)
            one.save(tree.pid)
            one.restore()
            one.unlock()
        undo(one)
        tree.wait_for(3)


def test_a_failed_process_does_not_keep_the_others(machine: Machine, hardware: Hardware, make: Make) -> None:
    with machine.program("spawn", STAY="1") as tree:
        child = int(open(f"/proc/{tree.pid}/task/{tree.pid}/children").read())
        machine.faults({"op": "checkpoint", "pid": child, "error": 999, "state": 3, "times": 1})
        one = make()
        one.lock(tree.pid)
        with pytest.raises(CudaError, match="unknown error"):
            one.save(tree.pid)
        assert one.restore() == {"failed": [child]}
        assert one.unlock() == {"failed": [child]}
        tree.wait_for(3)


def test_a_process_that_ends_meanwhile_is_left_out(machine: Machine, make: Make) -> None:
    with machine.program() as tree:
        one = make()
        one.lock(tree.pid)
        os.kill(tree.pid, signal.SIGKILL)
        tree.wait()
        assert (one.restore(), one.unlock()) == ({}, {})


def test_a_child_that_cuda_does_not_know_is_found_before_anything_is_locked(
    machine: Machine, hardware: Hardware, make: Make
) -> None:
    with machine.program("fork") as tree:
        one = make()
        with pytest.raises(CudaError, match="initialization error"):
            one.lock(tree.pid)
        assert undo(one) == 1
        assert state(hardware, tree) is State.RUNNING
        (child,) = open(f"/proc/{tree.pid}/task/{tree.pid}/children").read().split()
        os.kill(int(child), signal.SIGKILL)


def test_whoever_holds_a_device_after_the_checkpoint_is_named(machine: Machine, make: Make) -> None:
    with machine.program() as tree:
        one = make()
        one.lock(tree.pid)
        with machine.program() as other, pytest.raises(CheckpointFailed) as caught:
            one.save(other.pid)  # as if it were of the tree, and had begun just now
        assert f"process {other.pid} (python) still holds /dev/nvidia0" in str(caught.value)
        assert "by spawn or forkserver" in str(caught.value)
        undo(one)
        tree.wait_for(3)


# ---------------------------------------------------------------- refused before anything is locked


def findings(tree: Program, hardware: Hardware) -> str:
    return "; ".join(str(finding) for finding in preflight.findings(tree.pid, hardware))


def test_a_running_program_is_accepted(machine: Machine, hardware: Hardware) -> None:
    with machine.program("spawn") as tree:
        assert findings(tree, hardware) == ""


def test_a_forked_child_is_refused(machine: Machine, hardware: Hardware) -> None:
    with machine.program("fork") as tree:
        (child,) = open(f"/proc/{tree.pid}/task/{tree.pid}/children").read().split()
        text = findings(tree, hardware)
        assert text.startswith(f"process {child} (python")
        assert "it inherited a GPU from the process that forked it" in text
        assert "spawn or forkserver" in text
        os.kill(int(child), signal.SIGKILL)


def test_mps_is_refused(machine: Machine, hardware: Hardware) -> None:
    with machine.program(CUDA_MPS_PIPE_DIRECTORY="/tmp/mps") as tree:
        assert "CUDA runs through MPS" in findings(tree, hardware)


def test_a_process_that_somebody_else_has_locked_is_refused(machine: Machine, hardware: Hardware) -> None:
    with machine.program() as tree:
        machine.cli("--action", "lock", "--pid", tree.pid)
        assert f"its CUDA state is locked: {'somebody else'}" in findings(tree, hardware)
        assert f"`cuda-checkpoint --action unlock --pid {tree.pid}`" in findings(tree, hardware)


def test_what_nothing_drives_is_refused_by_its_cause(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**machine.env, "STASIS_CUDA_CHECKPOINT": "none", "STASIS_CUDA_BINDINGS": "/none"}.items():
        monkeypatch.setenv(name, value)
    with machine.program() as tree:
        text = findings(tree, Hardware())
        assert "an NVIDIA GPU is in use, and nothing drives this node's GPUs (driver API: " in text
        assert "no none in the agent's PATH" in text


def test_device_memory_needs_room_in_the_container(
    machine: Machine, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine.program(PAGES="4096") as tree:
        assert preflight.memory(tree.pid, tree.pid, hardware) == 18 << 20
        monkeypatch.setattr(preflight.room, "memory_left", lambda pid, reclaimable: 10 << 20)
        with pytest.raises(ResourceShort, match=r"18 MiB of GPU memory .* whose limit leaves 10 MiB"):
            preflight.memory(tree.pid, tree.pid, hardware)


# ---------------------------------------------------------------- where it is restored

FIRST, SECOND, THIRD = map(dashed, UUIDS[:3])
SAVED = Saved("580.65.06", {FIRST: "NVIDIA H100"}, {"7": (FIRST,)}, 1 << 20)


@pytest.fixture
def node(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hardware]:
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    one = Hardware()
    yield one
    one.close()


def test_a_gpu_is_kept_where_it_is_there_and_else_another_of_its_model_taken(node: Hardware) -> None:
    h100 = [Gpu(uuid, "NVIDIA H100", n) for n, uuid in enumerate((FIRST, SECOND))]
    assert place(SAVED, h100, node) == {FIRST: FIRST}
    assert place(SAVED, h100[1:], node) == {FIRST: SECOND}
    both = Saved("580.65.06", dict.fromkeys((SECOND, THIRD), "NVIDIA H100"), {"7": (SECOND, THIRD)}, 0)
    assert place(both, h100, node) == {SECOND: SECOND, THIRD: FIRST}


@pytest.mark.parametrize(
    ("here", "text"),
    [
        ([], "the checkpoint needs 1 x NVIDIA H100, the container has none"),
        ([Gpu(SECOND, "NVIDIA A100", 0)], "the checkpoint needs 1 x NVIDIA H100, the container has 1 x NVIDIA A100"),
    ],
)
def test_missing_and_other_gpus_are_refused(node: Hardware, here: list[Gpu], text: str) -> None:
    with pytest.raises(Refused, match=text):
        place(SAVED, here, node)


def test_another_driver_is_refused(machines: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in machines(driver="590.1.2").env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match=r"the NVIDIA driver was 580\.65\.06 at the checkpoint and is 590\.1\.2 here"):
        place(SAVED, [Gpu(FIRST, "NVIDIA H100", 0)], Hardware())


def test_an_old_driver_restores_only_where_it_was(machines: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in machines(driver="570.86.10").env.items():
        monkeypatch.setenv(name, value)
    hardware, saved = Hardware(), Saved("570.86.10", {FIRST: "NVIDIA H100"}, {"7": (FIRST,)}, 0)
    assert place(saved, [Gpu(FIRST, "NVIDIA H100", 0)], hardware) == {FIRST: FIRST}
    with pytest.raises(Refused, match=r"would have to move to other GPUs, which the driver 570\.86\.10 cannot do"):
        place(saved, [Gpu(SECOND, "NVIDIA H100", 1)], hardware)
    hardware.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"driver": 5},
        {"memory": "1"},
        {"models": [FIRST]},
        {"models": {FIRST: 1}},
        {"processes": {"7": [SECOND]}},
        {"processes": {"x": [FIRST]}},
        {"processes": {"7": FIRST}},
        {"processes": None},
    ],
)
def test_what_a_checkpoint_says_of_gpus_is_checked(changed: dict[str, object]) -> None:
    data = {**SAVED.as_dict(), "processes": {"7": [FIRST]}}
    assert Saved.from_dict(data) == SAVED
    with pytest.raises(Corrupt):
        Saved.from_dict({**data, **changed})


def test_the_worker_needs_nothing_of_stasis() -> None:
    """It runs alone, and says so where there is no driver."""
    done = subprocess.run(
        [sys.executable, "-I", Path(devices.__file__).with_name("worker.py")], input="", capture_output=True, text=True
    )
    assert done.stdout.startswith('{"error": ')
