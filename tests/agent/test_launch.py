"""Programs are waited for with a limit."""

import subprocess

import pytest

from stasis.agent.launch import kill_group, wait


def test_the_status_of_a_program_that_ends_in_time() -> None:
    assert wait(subprocess.Popen(["/bin/sh", "-c", "exit 3"]), 20) == 3


def test_a_program_that_takes_too_long_lives_on_for_the_caller_to_kill() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with pytest.raises(subprocess.TimeoutExpired):
        wait(process, 0.05)
    assert process.poll() is None
    kill_group(process)
