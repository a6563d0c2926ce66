"""Both drivers do the same on the simulator: answers, refusals, deadlines."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from tests.gpusim.conftest import MakeMachine
from tests.gpusim.machine import UUIDS, Machine, bytes_held, dashed, device_mappings

from stasis.agent.cuda.driver import CudaError, Driver, GivenUp, Patience, State
from stasis.agent.cuda.find import holders, minors
from stasis.agent.cuda.hardware import Hardware
from stasis.errors import Unsupported

pytestmark = pytest.mark.root

SOON = 5.0


@pytest.fixture(params=["api", "cli"])
def driver(request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    use(machine, monkeypatch, request.param)
    hardware = Hardware()
    yield hardware.driver()
    hardware.close()


def use(machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str = "") -> None:
    for name, value in {**machine.env, "STASIS_CUDA_DRIVER": kind}.items():
        monkeypatch.setenv(name, value)


def soon() -> Patience:
    return Patience(SOON)


def test_ten_cycles(machine: Machine, driver: Driver) -> None:
    with machine.program() as one:
        held = bytes_held(one.pid)
        for _ in range(10):
            assert driver.state(one.pid, soon()) is State.RUNNING
            driver.lock(one.pid, 1.0, soon())
            assert driver.state(one.pid, soon()) is State.LOCKED
            driver.checkpoint(one.pid, soon())
            assert driver.state(one.pid, soon()) is State.CHECKPOINTED
            driver.restore(one.pid, {}, soon())
            assert driver.state(one.pid, soon()) is State.LOCKED
            driver.unlock(one.pid, soon())
            one.wait_for(2)
        assert bytes_held(one.pid) == held
        assert driver.restore_thread(one.pid, soon()) in map(int, os.listdir(f"/proc/{one.pid}/task"))


def test_a_refusal_is_told_in_the_drivers_words(machine: Machine, driver: Driver) -> None:
    with machine.program() as one:
        with pytest.raises(CudaError, match="cannot be performed in the present state"):
            driver.checkpoint(one.pid, soon())
        machine.faults({"op": "lock", "error": 2, "times": 1})
        with pytest.raises(CudaError, match="out of memory"):
            driver.lock(one.pid, 1.0, soon())
        driver.lock(one.pid, 1.0, soon())
    with pytest.raises(CudaError, match="initialization error"):
        driver.state(os.getpid(), soon())


def test_a_failed_process_says_so(machine: Machine, driver: Driver) -> None:
    with machine.program(STAY="1") as one:
        machine.faults({"op": "checkpoint", "error": 999, "state": 3})
        driver.lock(one.pid, 1.0, soon())
        with pytest.raises(CudaError, match="unknown error"):
            driver.checkpoint(one.pid, soon())
        assert driver.state(one.pid, soon()) is State.FAILED


def test_a_lock_that_kernels_delay_is_given_back(machine: Machine, driver: Driver) -> None:
    with machine.program(KERNEL_MS="1000") as one:
        time.sleep(0.1)
        with pytest.raises(CudaError, match="device not ready"):
            driver.lock(one.pid, 0.2, soon())
        assert driver.state(one.pid, soon()) is State.RUNNING


def test_gpus_are_exchanged_by_their_uuids(machine: Machine, driver: Driver) -> None:
    first, second = map(dashed, UUIDS[:2])
    with machine.program() as one:
        driver.lock(one.pid, 1.0, soon())
        driver.checkpoint(one.pid, soon())
        with pytest.raises(CudaError, match="invalid argument"):
            driver.restore(one.pid, {first: second}, soon())
        driver.restore(one.pid, {first: second, second: first}, soon())
        assert any(line.split()[5] == "/dev/nvidia1" for line in device_mappings(one.pid))
        driver.unlock(one.pid, soon())
        one.wait_for(2)


def test_a_call_on_a_frozen_process_is_given_up_and_happens_later(machine: Machine, driver: Driver) -> None:
    with machine.program() as one:
        os.kill(one.pid, signal.SIGSTOP)
        with pytest.raises(GivenUp):
            driver.lock(one.pid, 1.0, Patience(0.5))
        assert driver.state(one.pid, soon()) is State.RUNNING  # a worker that hangs is in nobody's way
        os.kill(one.pid, signal.SIGCONT)
        end = time.monotonic() + SOON
        while driver.state(one.pid, soon()) is not State.LOCKED:
            assert time.monotonic() < end
        driver.unlock(one.pid, soon())
        one.wait_for(2)


def test_a_call_can_be_cancelled(machine: Machine, driver: Driver) -> None:
    cancel = os.eventfd(0)
    with machine.program() as one:
        machine.faults({"op": "lock", "hang": True})
        threading.Timer(0.3, os.eventfd_write, (cancel, 1)).start()
        start = time.monotonic()
        with pytest.raises(GivenUp):
            driver.lock(one.pid, 1.0, Patience(60.0, cancel))
        assert time.monotonic() - start < 5.0
    os.close(cancel)


def test_calls_on_several_processes_overlap(machine: Machine, driver: Driver) -> None:
    machine.faults({"op": "lock", "delay_ms": 600})
    with machine.program() as one, machine.program() as two:
        for pid in (one.pid, two.pid):
            driver.state(pid, soon())  # workers are there
        start = time.monotonic()
        threads = [threading.Thread(target=driver.lock, args=(one_.pid, 3.0, soon())) for one_ in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 1.15
        assert {driver.state(pid, soon()) for pid in (one.pid, two.pid)} == {State.LOCKED}


def test_no_child_outlives_its_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(machine, monkeypatch, "api")
    hardware = Hardware()
    hardware.driver()
    assert children("worker.py")
    hardware.close()
    assert not children("worker.py")


def children(name: str) -> list[int]:
    pids = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    return [int(pid) for pid in pids if name in open(f"/proc/{pid}/cmdline").read()]


# ---------------------------------------------------------------- what a node has


def test_the_api_is_preferred_and_the_command_does_as_well(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(machine, monkeypatch)
    found = Hardware()
    assert found.version == "580.65.06"
    assert [(gpu.uuid, gpu.model, gpu.minor) for gpu in found.gpus()] == [
        (dashed(UUIDS[n]), "NVIDIA H100", n) for n in range(2)
    ]
    assert found.driver().name == "driver API"
    found.close()
    monkeypatch.setenv("STASIS_CUDA_BINDINGS", "/nonexistent")
    assert Hardware().driver().name == "cuda-checkpoint"


@pytest.mark.parametrize(
    ("version", "name"), [("570.86.10", "driver API"), ("565.57.01", "cuda-checkpoint"), ("550.54.15", "")]
)
def test_old_drivers(machines: MakeMachine, monkeypatch: pytest.MonkeyPatch, version: str, name: str) -> None:
    machine = machines(driver=version)
    use(machine, monkeypatch)
    hardware = Hardware()
    if not name:
        with pytest.raises(Unsupported, match=r"550\.54\.15 has no lock and checkpoint actions.*update the driver"):
            hardware.driver()
        return
    driver = hardware.driver()
    assert driver.name == name
    with machine.program() as one:
        driver.lock(one.pid, 1.0, soon())
        assert driver.state(one.pid, soon()) is State.LOCKED
    hardware.close()


def test_a_node_with_a_gpu_but_nothing_to_drive_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(machine, monkeypatch)
    monkeypatch.setenv("STASIS_CUDA_BINDINGS", "/nonexistent")
    monkeypatch.setenv("STASIS_CUDA_CHECKPOINT", "no-such-program")
    with pytest.raises(Unsupported, match=r"driver API: .*; no no-such-program in the agent's PATH"):
        Hardware().driver()


def test_memory_is_told_by_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(machine, monkeypatch)
    with machine.program() as one, machine.program():
        assert Hardware().memory({one.pid}) == bytes_held(one.pid)
    monkeypatch.setenv("STASIS_NVIDIA_SMI", "false")
    with pytest.raises(Unsupported, match="a working nvidia-smi"):
        Hardware().memory({1})


def test_processes_are_found_by_what_they_hold(machine: Machine) -> None:
    with machine.program("fork") as one:
        (child,) = open(f"/proc/{one.pid}/task/{one.pid}/children").read().split()
        found = holders(one.pid)
        assert set(found) == {one.pid, int(child)}
        assert minors(found[one.pid]) == {0}  # mapped; the nodes of a program on the host lie elsewhere
        os.kill(int(child), signal.SIGKILL)
