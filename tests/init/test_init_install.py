"""init install: how init comes into a pod, by an init container and an emptyDir, whoever that container runs as."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.root


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """An emptyDir, as kubelet makes it."""
    folder = tmp_path / "emptydir"
    folder.mkdir()
    os.chmod(folder, 0o777)
    return folder


@pytest.fixture
def program(tmp_path: Path, init_binary: Path) -> Path:
    """init where every user can run it, as in its image."""
    copy = tmp_path / "init"
    copy.write_bytes(init_binary.read_bytes())
    copy.chmod(0o755)
    return copy


def install(program: Path, volume: Path, *, uid: int = 0, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, "install", volume], user=uid, group=uid, extra_groups=[], umask=umask, capture_output=True, text=True
    )


def build(program: Path) -> str:
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.split()[2]


@pytest.mark.parametrize("uid", [0, 65532])
def test_the_program_is_put_where_its_build_says_for_all_to_run(program: Path, volume: Path, uid: int) -> None:
    done = install(program, volume, uid=uid, umask=0o077)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    there = volume / build(program) / "init"
    assert there.read_bytes() == program.read_bytes()
    assert there.stat().st_mode & 0o7777 == 0o755
    assert there.parent.stat().st_mode & 0o777 == 0o755
    assert os.listdir(there.parent) == ["init"]
    assert build(there) == build(program)


def test_again_leaves_what_is_there_also_as_another_user(program: Path, volume: Path) -> None:
    install(program, volume)
    there = volume / build(program) / "init"
    before = there.stat().st_ino
    assert install(program, volume, uid=65532).returncode == 0
    assert there.stat().st_ino == before


def test_a_volume_that_cannot_be_written_is_told(program: Path, volume: Path) -> None:
    os.chmod(volume, 0o555)
    done = install(program, volume, uid=65532)
    assert (done.returncode, done.stderr) == (125, f"stasis-init: {volume}/{build(program)}: Permission denied\n")
