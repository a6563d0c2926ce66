"""The simulator behaves as the real driver and cuda-checkpoint were seen to: states, texts, exit codes, what hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from tests.gpusim.conftest import MakeMachine
from tests.gpusim.machine import UUIDS, Machine, bytes_held, dashed, device_descriptors, device_mappings

pytestmark = pytest.mark.root

ILLEGAL = "the operation cannot be performed in the present state"
DONE = (0, "", "")


def act(machine: Machine, action: str, pid: int, *more: object) -> tuple[int, str, str]:
    return machine.cli("--action", action, "--pid", pid, *more)


def state(machine: Machine, pid: int) -> str:
    return machine.cli("--get-state", "--pid", pid)[1]


def refused(action: str, pid: int, cause: str) -> tuple[int, str, str]:
    return 1, "", f'Could not {action} on process ID {pid}: "{cause}"'


def test_a_cycle_moves_memory_to_the_host_and_back(machine: Machine) -> None:
    with machine.program() as one:
        assert state(machine, one.pid) == "running"
        assert [os.path.basename(path) for path in device_descriptors(one.pid)] == ["nvidia0", "nvidia1", "nvidiactl"]
        held = bytes_held(one.pid)
        assert held >= 4 << 20
        tid = machine.cli("--get-restore-tid", "--pid", one.pid)[1]
        assert os.path.exists(f"/proc/{one.pid}/task/{tid}")
        assert state(machine, int(tid)) == "running"  # cuda-checkpoint#41
        assert act(machine, "lock", one.pid) == DONE
        assert state(machine, one.pid) == "locked"
        assert one.still()
        assert act(machine, "checkpoint", one.pid) == DONE
        assert (device_descriptors(one.pid), device_mappings(one.pid)) == ([], [])
        assert act(machine, "restore", one.pid) == DONE
        assert state(machine, one.pid) == "locked"
        assert bytes_held(one.pid) == held
        assert one.still()
        assert act(machine, "unlock", one.pid) == DONE
        one.wait_for(3)


def test_each_action_has_one_state_that_it_begins_in(machine: Machine) -> None:
    wrong = {
        "running": ("checkpoint", "restore", "unlock"),
        "locked": ("lock", "restore"),
        "checkpointed": ("lock", "checkpoint", "unlock"),
    }
    with machine.program() as one:
        for now, action in (("running", "lock"), ("locked", "checkpoint"), ("checkpointed", "")):
            assert state(machine, one.pid) == now
            for other in wrong[now]:
                assert act(machine, other, one.pid) == refused(other, one.pid, ILLEGAL)
            assert not action or act(machine, action, one.pid) == DONE


def test_a_lock_waits_for_kernels_or_leaves_the_process_running(machine: Machine) -> None:
    with machine.program(KERNEL_MS="1500") as one:
        time.sleep(0.2)  # the next one runs
        start = time.monotonic()
        assert act(machine, "lock", one.pid, "--timeout", 200) == refused("lock", one.pid, "device not ready")
        assert time.monotonic() - start < 1.0
        assert state(machine, one.pid) == "running"
        assert act(machine, "lock", one.pid) == DONE


def test_a_checkpoint_waits_for_what_was_submitted(machine: Machine) -> None:
    with machine.program("queue") as one:
        for _ in range(3):
            for action in ("lock", "checkpoint", "restore", "unlock"):
                assert act(machine, action, one.pid) == DONE
            one.wait_for(2)


def test_a_lock_of_a_frozen_process_hangs_and_happens_when_it_runs(machine: Machine) -> None:
    with machine.program() as one:
        os.kill(one.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            machine.cli("--action", "lock", "--pid", one.pid, timeout=0.5)
        assert state(machine, one.pid) == "running"
        os.kill(one.pid, signal.SIGCONT)
        end = time.monotonic() + 5
        while state(machine, one.pid) != "locked":
            assert time.monotonic() < end
        assert act(machine, "unlock", one.pid) == DONE
        one.wait_for(2)


def test_memory_comes_back_on_another_gpu_of_the_same_chip(machines: MakeMachine) -> None:
    machine = machines(["H100", "H100", "A100"])
    first, second, other = map(dashed, UUIDS[:3])
    with machine.program(DEVICE="0") as one:
        for action in ("lock", "checkpoint"):
            assert act(machine, action, one.pid) == DONE
        for wrong in (f"{first}={second}", f"{first}={other},{second}={second},{other}={other}"):
            assert act(machine, "restore", one.pid, "--device-map", wrong) == refused(
                "restore", one.pid, "invalid argument"
            )
        swap = f"{first}={second},{second}={first},{other}={other}"
        assert act(machine, "restore", one.pid, "--device-map", swap) == DONE
        assert {line.split()[5] for line in device_mappings(one.pid)} == {"/dev/nvidia1", "/dev/nvidiactl"}
        assert act(machine, "unlock", one.pid) == DONE
        one.wait_for(3)


def test_a_restore_into_full_memory_changes_nothing_and_can_be_repeated(machines: MakeMachine) -> None:
    machine = machines(["H100"], mib=20)
    with machine.program(PAGES="2048") as one:
        for action in ("lock", "checkpoint"):
            assert act(machine, action, one.pid) == DONE
        with machine.program(PAGES="3072"):
            assert act(machine, "restore", one.pid) == refused("restore", one.pid, "out of memory")
            assert state(machine, one.pid) == "checkpointed"
        assert act(machine, "restore", one.pid) == DONE
        assert act(machine, "unlock", one.pid) == DONE
        one.wait_for(3)


def test_a_forked_child_is_no_cuda_process(machine: Machine) -> None:
    with machine.program("fork") as one:
        child = open(f"/proc/{one.pid}/task/{one.pid}/children").read().split()[0]
        assert machine.cli("--get-state", "--pid", child) == (
            1,
            "",
            f'Error getting process state for process ID {child}: "initialization error"',
        )
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("mode", ["multicast", "ipc"])
def test_shared_memory_hangs_a_checkpoint(machine: Machine, mode: str) -> None:
    with machine.program(mode) as one:
        assert act(machine, "lock", one.pid) == DONE
        with pytest.raises(subprocess.TimeoutExpired):
            machine.cli("--action", "checkpoint", "--pid", one.pid, timeout=0.5)


@pytest.mark.parametrize("damage", ["content", "one", "swap", "dead"])
def test_damaged_memory_is_noticed_by_the_program(machine: Machine, damage: str) -> None:
    """The tests of whole gangs rest on it: whatever a restore does to one allocation ends the program."""
    with machine.program() as one:
        machine.faults({"op": "restore", "damage": damage})
        for action in ("lock", "checkpoint", "restore", "unlock"):
            assert act(machine, action, one.pid) == DONE
        assert one.wait() == 1


USAGE = [
    ([], "No operation selected"),
    (["--toggle"], "Missing pid to perform operation on"),
    (["--toggle", "--get-state", "-p", "1"], "Too many operations selected"),
    (["--toggle", "-p", "x"], "pid must be a non-negative integer"),
    (["--action", "lock", "-p", "1", "-t", "-5"], "timeout must be a non-negative integer"),
    (["--action", "unlock", "-p", "1", "-t", "5"], "Timeout is only valid for --action lock operation"),
    (["--bogus"], "Invalid option(s) or option(s) not supported by this CUDA Driver"),
]


@pytest.mark.parametrize(("arguments", "text"), USAGE)
def test_wrong_usage(machine: Machine, arguments: list[str], text: str) -> None:
    assert machine.cli(*arguments) == (1, "", text)


@pytest.mark.parametrize(
    ("driver", "arguments"),
    [
        ("550.54.15", ["--action", "lock", "-p", "1"]),
        ("565.57.01", ["--action", "lock", "-p", "1", "-t", "5"]),
        ("570.86.10", ["--action", "restore", "-p", "1", "-d", f"{dashed(UUIDS[0])}={dashed(UUIDS[0])}"]),
    ],
)
def test_an_old_driver_knows_less(machines: MakeMachine, driver: str, arguments: list[str]) -> None:
    assert machines(driver=driver).cli(*arguments)[2] == USAGE[-1][1]


def test_transfers_take_their_time(machines: MakeMachine) -> None:
    machine = machines(["H100"], bandwidth="40:80")
    with machine.program(PAGES="4096") as one:
        assert act(machine, "lock", one.pid) == DONE
        seconds = []
        for action in ("checkpoint", "restore"):
            start = time.monotonic()
            assert act(machine, action, one.pid) == DONE
            seconds.append(time.monotonic() - start)
    assert 0.35 < seconds[0] < 1.2  # 16 MiB at 40 MB/s
    assert 0.17 < seconds[1] < 0.8
