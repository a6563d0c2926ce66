"""The programs that Stasis starts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from stasis.agent import provision
from stasis.agent.criu import LOADER
from stasis.doctor.check import NEW_MOUNTS, Check, Need, apart, mount_tmpfs
from stasis.errors import Unsupported

AREA = "programs"
PACKAGES = {
    "runc": ("runc", "the local commands start no containers without it"),
    "ip": ("iproute2", "containers get no network without it"),
    "nsenter": ("util-linux", "CRIU cannot be started inside a container without it"),
    "mount": ("mount", "containers get no root file system without it"),
}


LOCAL = ("runc", "mount")  # a node of a cluster has its own runtime


def checks(*, node: bool = False) -> Iterator[Check]:
    yield from _criu()
    yield _init()
    if not node:
        yield _rootfs()
    for program, (package, meaning) in PACKAGES.items():
        if node and program in LOCAL:
            continue
        need = Need(AREA, program, meaning, f"install {package}")
        path = shutil.which(program)
        yield need.seen(path is not None, path or "not found")


def _criu() -> Iterator[Check]:
    need = Need(AREA, "CRIU", "CRIU is what dumps and restores processes", "run tools/criu.sh")
    bundle, why = _find(provision.criu)
    if bundle is None:
        yield need.seen(False, why)
        return
    version = _run(bundle, "--version")
    found = version.stdout.splitlines()[0].removeprefix("Version: ") if version.stdout else version.stderr.strip()
    yield need.seen(version.returncode == 0, f"{found} in {bundle}")

    def probe() -> str:
        mount_tmpfs(Path("/run"))  # CRIU keeps what it finds out about the kernel there
        checked = _run(bundle, "check", "--no-default-config", "--lib", str(bundle / "lib"))
        if checked.returncode:
            errors = [line.strip() for line in checked.stderr.splitlines() if "Error" in line]
            raise OSError("; ".join(errors[:3]) or f"exit status {checked.returncode}")
        return "looks good"

    need = Need(AREA, "criu check", "CRIU misses something of this kernel", "the message names the feature")
    yield need.tried(apart(NEW_MOUNTS, probe))


def _init() -> Check:
    need = Need(AREA, "init", "init is the first process of a prepared container", "run tools/init.sh")
    binary, why = _find(provision.init)
    if binary is None:
        return need.seen(False, why)
    version = subprocess.run([binary, "--version"], capture_output=True, text=True).stdout.strip()
    return need.seen(True, f"{version} in {binary.parent}")


def _rootfs() -> Check:
    meaning = "the demo and the cases start containers from it"
    need = Need(AREA, "training image", meaning, "run tools/rootfs.sh", needed=False)
    folder, why = _find(provision.rootfs)
    return need.seen(folder is not None, why or str(folder))


def _find(piece: Callable[[], Path]) -> tuple[Path | None, str]:
    """Where a piece is, or why it was not found."""
    try:
        return piece(), ""
    except Unsupported as error:
        return None, error.message
    except PermissionError as error:
        return None, f"{error.filename} cannot be read"


def _run(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [str(bundle / LOADER), "--library-path", str(bundle), str(bundle / "criu"), *arguments]
    return subprocess.run(argv, env={}, capture_output=True, text=True, timeout=60)
