"""The fingerprint of this machine is what its tools say."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.preflight.conftest import TOOLS, Pod

from stasis.agent import fingerprint
from stasis.core.fingerprint import compare, instructions
from stasis.errors import Unsupported

pytestmark = [pytest.mark.root, pytest.mark.criu]


def test_of_this_machine(pod: Callable[[str], Pod], init_binary: Path) -> None:
    bundle = Path(subprocess.run([TOOLS / "criu.sh"], check=True, capture_output=True, text=True).stdout.strip())
    container = pod("ready()")

    found = fingerprint.read(bundle, container.root.pid, "sha256:image")

    assert found.architecture == os.uname().machine
    assert found.criu == "4.2.1"
    assert found.init == f"sha256:{hashlib.sha256(init_binary.read_bytes()).hexdigest()}"
    assert found.init == fingerprint.read(bundle, container.pid1).init  # the keeper's and PID 1's are one
    assert found.image == "sha256:image"
    assert found.cpu_model
    assert found.signal_frame > 0
    assert "sse2" in instructions(found) or found.architecture != "x86_64"
    assert compare(found, found).refusals == ()


def test_a_bundle_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "ld-linux-x86-64.so.2").symlink_to("/bin/false")
    with pytest.raises(Unsupported, match="does not run"):
        fingerprint.criu_version(tmp_path)


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        fingerprint.digest_of_program(process.pid)
