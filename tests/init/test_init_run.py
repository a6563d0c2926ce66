"""init run: the command runs as if init were not there, and its end is the container's."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Init, children, status, until

pytestmark = pytest.mark.root
Start = Callable[..., Init]
Write = Callable[[str, str], None]

PRINT_SIGNALS = """
import signal, sys, time
def say(n, frame):
    print("got", signal.Signals(n).name, flush=True)
    if n == signal.SIGTERM: sys.exit(3)
for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
          signal.SIGCONT, signal.SIGTSTP):
    signal.signal(n, say)
print("ready", flush=True)
while True: time.sleep(1)
"""


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_exits_with_the_commands_code(start: Start, code: int) -> None:
    assert start("run", "sh", "-c", f"exit {code}").wait() == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1, 16])
def test_a_command_killed_by_a_signal_exits_with_128_more(start: Start, number: int) -> None:
    assert start("run", "sh", "-c", f"kill -{number:d} $$; sleep 60").wait() == 128 + number


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        ("no-such-program", 127, "No such file or directory"),
        ("/no/such/program", 127, "No such file or directory"),
        ("/etc/passwd", 126, "Permission denied"),
        ("SCRIPT", 126, "the interpreter that it names does not exist"),
    ],
)
def test_what_cannot_be_executed_is_named_with_the_reason(
    start: Start, tmp_path: Path, command: str, code: int, why: str
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    command = command.replace("SCRIPT", str(script))
    run = start("run", command)
    assert run.wait() == code
    assert run.err.read_text() == f"stasis-init: {command}: {why}\n"


def test_signals_reach_the_command_and_job_stops_do_not(start: Start) -> None:
    run = start("run", "python3", "-c", PRINT_SIGNALS)
    run.says("ready")
    os.kill(run.pid, signal.SIGTSTP)
    for name in ("INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"):
        os.kill(run.pid, signal.Signals[f"SIG{name}"])
        run.says(f"got SIG{name}")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 3
    assert "TSTP" not in run.output()


def test_only_the_command_itself_gets_a_signal(start: Start) -> None:
    run = start(
        "run", "sh", "-c", "sh -c 'trap \"echo child\" USR1; while :; do sleep 0.05; done' & trap 'exit 9' USR1; wait"
    )
    until(lambda: children(run.trainer), "the command's child")
    child = children(run.trainer)[0]
    until(lambda: int(status(child)["SigCgt"], 16) & 1 << 9, "the child's trap")
    os.kill(run.pid, signal.SIGUSR1)
    assert run.wait() == 9
    assert "child" not in run.output()


def test_a_continue_from_outside_leaves_a_stopped_command_stopped(start: Start) -> None:
    """The agent continues each task of a restored tree by itself, but for those that were stopped at the dump."""
    run = start("run", "sleep", "300")
    trainer = run.trainer
    os.kill(trainer, signal.SIGSTOP)
    until(lambda: status(trainer)["State"].startswith("T"), "the stop")
    os.kill(run.keeper, signal.SIGCONT)
    until(lambda: int(status(run.keeper)["ShdPnd"], 16) == 0, "the keeper's look at the signal")
    assert status(trainer)["State"].startswith("T")
    os.kill(run.pid, signal.SIGCONT)
    until(lambda: status(trainer)["State"].startswith("S"), "the continue")


def test_orphans_stay_below_the_keeper_and_zombies_are_reaped(start: Start) -> None:
    run = start("run", "sh", "-c", "for i in 1 2 3 4 5; do (sleep 0.1 &); done; (setsid sleep 300 &); exec sleep 301")

    def orphans() -> list[int]:
        return [pid for pid in children(run.keeper) if pid != run.trainer]

    def lonely() -> bool:
        try:
            return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in orphans()] == [b"sleep\x00300\x00"]
        except (FileNotFoundError, ProcessLookupError):
            return False  # one of them has just ended

    until(lonely, "five orphans reaped, the sixth alive")
    assert status(orphans()[0])["PPid"] == str(run.keeper)
    assert children(run.pid) == [run.keeper]


def test_the_command_starts_clean(start: Start, tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w") as leak:
        run = start(
            "run",
            "python3",
            "-c",
            "import os; print(open('/proc/self/status').read(), sorted(os.listdir('/proc/self/fd')), os.getcwd())",
            wrap=f"sh -c 'cd {tmp_path}; exec env --block-signal=USR1 --ignore-signal=USR2,PIPE,CHLD \"$@\"' sh",
            pass_fds=[leak.fileno()],
        )
        assert run.wait() == 0
    text = run.out.read_text()
    lines = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    assert int(lines["SigBlk"], 16) == 0
    assert int(lines["SigIgn"], 16) & ~(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0  # Python's own
    assert f"['0', '1', '2', '3'] {tmp_path}" in text  # 3 is the listing's own


def test_the_keeper_holds_nothing_that_a_dump_must_carry(start: Start, tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w") as leak:
        run = start("run", "sleep", "300", pass_fds=[leak.fileno()])
        keeper, trainer = run.keeper, run.trainer
        assert sorted(os.listdir(f"/proc/{keeper}/fd")) == ["0", "1", "2"]
    assert os.readlink(f"/proc/{keeper}/cwd") == "/"
    assert Path(f"/proc/{keeper}/timers").read_text() == ""
    assert os.getsid(keeper) == keeper
    assert os.getsid(trainer) == os.getpgid(trainer) == trainer
    assert int(status(keeper)["VmRSS"].split()[0]) < 1024  # kB


def test_the_end_of_the_grace_period_kills_the_tree(start: Start) -> None:
    deaf = "trap '' TERM; (trap '' TERM; sleep 300) & echo ready; while :; do sleep 0.1; done"
    run = start("run", "sh", "-c", deaf, options=["--grace", "0.2"])
    run.says("ready")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGKILL
    assert "stasis-init: still running at the end of the grace period: killed\n" in run.err.read_text()


def test_without_a_grace_period_a_deaf_command_runs_on(start: Start) -> None:
    run = start("run", "sh", "-c", "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done")
    run.says("ready")
    os.kill(run.pid, signal.SIGTERM)
    run.says("heard")
    assert run.unshare.poll() is None


def test_a_command_killed_for_its_release_is_not_a_success(start: Start, write: Write) -> None:
    run = start("run", "sleep", "300")
    trainer = run.trainer
    write("word", "released")
    os.kill(trainer, signal.SIGKILL)
    assert run.wait() == 143


def test_a_release_of_an_earlier_run_is_not_this_ones(start: Start, write: Write) -> None:
    write("word", "released")
    run = start("run", "sleep", "300")
    os.kill(run.trainer, signal.SIGKILL)
    assert run.wait() == 137
    assert run.err.read_text() == ""


def test_run_needs_no_agent(start: Start, volume: Path) -> None:
    volume.rmdir()
    assert start("run", "sh", "-c", "exit 4").wait() == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--", "true"], "--volume: missing"),
        (["run", "--volume", "/tmp", "--"], "COMMAND: missing"),
        (["run", "--volume", "/tmp", "--grace", "soon", "--", "true"], "--grace: not a number of seconds"),
        (["run", "--volume", "/tmp", "--deny", "x", "--", "true"], "--deny: expected a list"),
        (["run", "--volumes", "/tmp", "--", "true"], "--volumes: unknown option"),
        (["probe", "/tmp"], "probe: expected: probe DIR"),
        (["run", "--volume", "/tmp", "--", "true"], "run: not PID 1"),
    ],
)
def test_a_wrong_use_is_told_and_is_no_success(init_binary: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([init_binary, *arguments], capture_output=True, text=True)
    assert done.returncode == 125
    assert done.stderr.startswith(f"stasis-init: {message}")
    assert done.stderr.count("\n") == 1


def test_the_version_names_the_build_that_the_path_holds(init_binary: Path) -> None:
    text = subprocess.run([init_binary, "--version"], capture_output=True, text=True, check=True).stdout
    name, version, build = text.split()
    assert name == "stasis-init"
    assert init_binary.parent.name == f"init-{version}-{build}"
