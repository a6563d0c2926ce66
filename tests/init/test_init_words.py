"""init wait and init probe: the agent's words, files in a volume that may be there before init and stay after it."""

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


def test_waits_until_it_is_told_to_run(start: Start, write: Write) -> None:
    wait = start("wait", "sh", "-c", "exit 6")
    wait.says("stasis-init: waiting for a restore")
    assert wait.unshare.poll() is None
    write("word", "run")
    assert wait.wait() == 6


def test_a_word_that_was_there_before_counts(start: Start, write: Write) -> None:
    write("word", "run")
    assert start("wait", "sh", "-c", "exit 6").wait() == 6


def test_a_volume_that_cannot_be_watched_is_looked_at_again(start: Start, write: Write, volume: Path) -> None:
    volume.rmdir()
    wait = start("wait", "sh", "-c", "exit 6")
    wait.says("waiting")
    volume.mkdir()
    write("word", "run")
    assert wait.wait() == 6


def test_a_container_restarted_in_place_after_its_restore_runs_its_command(start: Start, write: Write) -> None:
    write("word", "restored 20001")
    wait = start("wait", "sh", "-c", "exit 6")
    assert wait.wait() == 6
    assert "stasis-init: restored before this container was started again: running the command\n" in wait.output()


def test_a_container_restarted_in_place_after_its_release_waits(start: Start, write: Write) -> None:
    write("word", "released")
    wait = start("wait", "sh", "-c", "exit 6")
    wait.says("stasis-init: released: waiting")
    os.kill(wait.pid, signal.SIGTERM)
    assert wait.wait() == 143


@pytest.mark.parametrize(
    "word", ["go", "restored", "restored x", "restored 1", "restored -2", "restored 7 8", "r" * 5000]
)
def test_a_word_that_is_not_understood_is_told_and_the_next_one_obeyed(start: Start, write: Write, word: str) -> None:
    wait = start("wait", "sh", "-c", "exit 6")
    write("word", word)
    wait.says(f"stasis-init: word not understood: {word[:63]}\n")
    write("word", "run")
    assert wait.wait() == 6
    assert wait.output().count("not understood") == 1


def test_restored_without_such_a_child_is_told_and_is_no_reason_to_run(start: Start, write: Write) -> None:
    wait = start("wait", "sh", "-c", "exit 6")
    wait.says("waiting")
    write("word", "restored 20001")
    wait.says("stasis-init: word not understood: there is no child 20001\n")
    write("word", "run")
    assert wait.wait() == 6


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT", "HUP"])
def test_told_to_stop_while_waiting_is_no_success(start: Start, name: str) -> None:
    wait = start("wait", "true")
    wait.says("waiting")
    os.kill(wait.pid, signal.SIGUSR1)
    os.kill(wait.pid, signal.Signals[f"SIG{name}"])
    assert wait.wait() == 128 + signal.Signals[f"SIG{name}"]


@pytest.mark.parametrize("early", [False, True], ids=["alive", "ended-before-its-word"])
def test_the_end_of_an_adopted_child_is_the_containers(start: Start, write: Write, tmp_path: Path, early: bool) -> None:
    wait = start("wait", "true")
    wait.says("waiting")
    fifo, note = tmp_path / "fifo", tmp_path / "note"
    os.mkfifo(fifo)
    child = f"echo $$ >{note}.new; mv {note}.new {note}; read x <{fifo}; exit 9"
    orphan = f"sh -c '{child}' >/dev/null 2>&1 &"  # it comes from outside and loses its parent, as CRIU's child does
    subprocess.run(["nsenter", "-t", str(wait.pid), "-p", "-m", "sh", "-c", orphan], check=True)
    until(lambda: note.exists() and children(wait.pid), "the child")
    if early:
        fifo.write_text("go\n")
        until(lambda: not children(wait.pid), "its end")
    write("word", f"restored {note.read_text().strip()}")
    if not early:
        until(lambda: status(wait.pid)["Name"] == "stasis-init", "the adoption")
        fifo.write_text("go\n")
    assert wait.wait() == 9


def probe(container: Init, binary: Path, volume: Path, *command: str) -> int:
    inside = ["nsenter", "-t", str(container.pid), "-p", "-m"]
    return subprocess.run([*inside, binary, "probe", volume, "--", *command], stderr=subprocess.DEVNULL).returncode


def test_a_probe_holds_while_waiting_and_is_the_users_own_afterwards(
    start: Start, write: Write, init_binary: Path, volume: Path
) -> None:
    wait = start("wait", "sleep", "300")
    wait.says("waiting")
    assert probe(wait, init_binary, volume, "false") == 0
    write("word", "run")
    assert wait.trainer
    assert probe(wait, init_binary, volume, "sh", "-c", "exit 5") == 5
    assert probe(wait, init_binary, volume, "no-such-check") == 127


def test_a_probe_holds_while_frozen_or_restoring(start: Start, write: Write, init_binary: Path, volume: Path) -> None:
    run = start("run", "sleep", "300")
    for state, code in [("frozen", 0), ("running", 5), ("restoring", 0), ("running", 5)]:
        write("state", state)
        assert probe(run, init_binary, volume, "sh", "-c", "exit 5") == code, state
