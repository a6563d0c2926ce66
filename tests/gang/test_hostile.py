"""A tenant who means harm: what lies in its container, or in the store, never makes the agent do its work."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.gang.lab import Lab

from stasis.core.records import decision_key
from stasis.errors import Refused, StasisError
from stasis.store import media
from stasis.store.checkpoint import open_checkpoint

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]


def library(folder: Path, name: str) -> Path:
    out = folder / f"{name}.so"
    source = Path(__file__).with_name("evil.c")
    subprocess.run(["gcc", "-shared", "-fPIC", f'-DMARK="/owned-{name}"', "-o", out, source], check=True)
    return out


def plant(root: Path, folder: Path) -> None:
    """All that a plain CRIU, its loader and its libraries would obey."""
    for place in ("etc/criu", "root/.criu"):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "default.conf").write_text("action-script /evil.sh\nlibdir /usr/lib/criu\nlog-file /owned-log\n")
    (root / "evil.sh").write_text("#!/bin/sh\n: >/owned-script\n")
    (root / "evil.sh").chmod(0o755)
    for place in ("usr/lib/criu", "var/lib/criu", "usr/lib/x86_64-linux-gnu/criu"):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "evil.so").write_bytes((library(folder, "plugin")).read_bytes())
    (root / "evil.so").write_bytes(library(folder, "preload").read_bytes())
    (root / "etc/ld.so.preload").write_text("/evil.so\n")
    os.mkfifo(root / "run/criu.kdat")


def test_planted_configuration_and_libraries_have_no_effect(lab: MakeLab, tmp_path: Path) -> None:
    one = lab()
    one.progress()
    for place in one.gang.places.values():
        plant(place.container.folder / "rootfs", tmp_path)
    one.operator.suspend()
    marks = [*Path("/").glob("owned-*"), *one.folder.glob("gang/*/upper/owned-*")]
    assert marks == []
    one.gang.wait(10)
    one.operator.resume()
    one.progress()
    roots = [place.container.folder / "rootfs" for place in one.gang.places.values()]
    assert all((root / "etc/ld.so.preload").exists() for root in roots)  # it was there when CRIU restored
    assert [*Path("/").glob("owned-*"), *one.folder.glob("gang/*/upper/owned-*")] == []
    one.operator.checkpoint()  # of a tree that was restored among them
    assert [*Path("/").glob("owned-*"), *one.folder.glob("gang/*/upper/owned-*")] == []
    one.finish()
