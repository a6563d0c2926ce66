"""The commands as a user meets them: output, exit codes, words that help."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stasis.cli import main

SAMPLE = Path(__file__).parents[1] / "store" / "samples" / "v1"


def stasis(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    shutil.copytree(SAMPLE, folder)
    return folder


def tag(stored: Path) -> str:
    return str(json.loads(stasis("ls", str(stored), "-o", "json").stdout)[0]["tag"])


def test_ls_and_inspect_tell_what_is_there(stored: Path) -> None:
    listed = json.loads(stasis("ls", str(stored), "-o", "json").stdout)
    assert {"tag", "digest", "uid", "ranks"} <= set(listed[0])
    ref = f"{stored}:{listed[0]['tag']}"
    found = json.loads(stasis("inspect", ref, "-o", "json").stdout)
    assert found["uid"] == listed[0]["uid"]
    assert [rank["rank"] for rank in found["ranks"]] == list(range(listed[0]["ranks"]))
    assert listed[0]["uid"] in stasis("inspect", ref).stdout


def test_verify_names_a_broken_blob_and_exits_with_9(stored: Path) -> None:
    ref = f"{stored}:{tag(stored)}"
    assert stasis("verify", ref).exit_code == 0
    blob = max((stored / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(data)
    result = stasis("verify", ref)
    assert result.exit_code == 9
    assert blob.name in result.stderr


def test_cp_then_rm(stored: Path, tmp_path: Path) -> None:
    ref, other = f"{stored}:{tag(stored)}", f"{tmp_path}/other:kept"
    assert stasis("cp", ref, other).exit_code == 0
    assert stasis("verify", other).exit_code == 0
    assert stasis("rm", other).exit_code == 0
    assert stasis("inspect", other).exit_code == 8


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "no-host-no-path"], 2, "oci:PATH"),
        (["inspect", "/nowhere:x"], 8, "/nowhere"),
        (["ls", "127.0.0.1:1/nothing"], 8, "127.0.0.1:1"),
        (["try"], 2, "COMMAND"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_wrong_use_is_told_in_words(arguments: list[str], code: int, words: str) -> None:
    result = stasis(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.output


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "stasis", *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.mark.root
@pytest.mark.criu
def test_try_gives_the_programs_output_and_status(tmp_path: Path) -> None:
    program = "import time, sys\nfor i in range(12): print('step', i, flush=True); time.sleep(.2)\nsys.exit(7)"
    ref = f"{tmp_path}/kept:one"
    done = run("try", "--after", "0.7", "--to", ref, "--", "python3", "-c", program)
    assert done.returncode == 7, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("step")] == [f"step {i}" for i in range(12)]
    assert "after 1 suspensions" in done.stderr
    assert stasis("verify", ref).exit_code == 0


@pytest.mark.root
@pytest.mark.criu
def test_try_names_what_cannot_be_carried() -> None:
    program = "import ctypes, time\nctypes.CDLL(None).semget(0x77, 1, 0o1600)\ntime.sleep(60)"
    done = run("try", "--after", "0.5", "--", "python3", "-c", program)
    assert done.returncode == 3
    assert "System V" in done.stderr
    assert "Remedy" in done.stderr or "remedy" in done.stderr


@pytest.mark.root
def test_try_that_is_terminated_leaves_no_container(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "stasis", "try", "--after", "60", "--", "sh", "-c", "echo here; sleep 60"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert running.stdout is not None
    assert running.stdout.readline() == "here\n"
    running.terminate()
    assert running.wait(30) == 128 + 15
    running.stdout.close()
    listed = subprocess.run(["runc", "list", "-q"], capture_output=True, text=True).stdout.split()
    assert not [name for name in listed if name.startswith(f"try{running.pid}-")]
