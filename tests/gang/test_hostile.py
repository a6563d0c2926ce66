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


def build(folder: Path, name: str, *options: str) -> bytes:
    source = Path(__file__).with_name("evil.c")
    subprocess.run(["gcc", *options, f'-DMARK="/owned-{name}"', "-o", folder / name, source], check=True)
    return (folder / name).read_bytes()


def plant(root: Path, folder: Path) -> None:
    """All that a plain CRIU, its loader and its libraries would obey, and the programs that it would run."""
    for place in ("etc/criu", "root/.criu"):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "default.conf").write_text("action-script /evil\nlibdir /usr/lib/criu\nlog-file /owned-log\n")
    for place in ("usr/lib/criu", "var/lib/criu", "usr/lib/x86_64-linux-gnu/criu"):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "evil.so").write_bytes(build(folder, "plugin", "-shared", "-fPIC"))
    (root / "evil.so").write_bytes(build(folder, "preload", "-shared", "-fPIC"))
    (root / "etc/ld.so.preload").write_text("/evil.so\n")
    for place in (
        "evil",
        "usr/bin/iptables",
        "usr/bin/ip6tables",
        "usr/bin/nft",
        "usr/bin/ip",
        "usr/bin/tar",
        "usr/bin/sh",
    ):
        (root / place).unlink(missing_ok=True)
        (root / place).write_bytes(build(folder, "program"))
        (root / place).chmod(0o755)
    os.mkfifo(root / "run/criu.kdat")


def marks(one: Lab) -> list[Path]:
    return [*Path("/").glob("owned-*"), *one.folder.glob("gang/*/upper/owned-*")]


def test_planted_configuration_libraries_and_programs_have_no_effect(lab: MakeLab, tmp_path: Path) -> None:
    one = lab()
    one.progress()
    for place in one.gang.places.values():
        plant(place.container.folder / "rootfs", tmp_path)
    one.operator.suspend()
    assert marks(one) == []
    one.gang.wait(10)
    one.operator.resume()
    one.progress()
    roots = [place.container.folder / "rootfs" for place in one.gang.places.values()]
    assert all((root / "etc/ld.so.preload").exists() for root in roots)  # it was there when CRIU restored
    assert marks(one) == []
    one.operator.checkpoint()  # of a tree that was restored among them
    assert marks(one) == []
    one.finish()
