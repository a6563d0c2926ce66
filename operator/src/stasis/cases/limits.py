"""What cannot be tried where the cases run: such a case says nothing about Stasis, and is listed with its reason."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stasis.cases.spec import Case

CAP_SYS_RESOURCE = 24
LIBUV_PROBE = """
import torch.distributed
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
print(store.libuvBackend)
"""


@dataclass(frozen=True)
class Place:
    """Where cases run. Asked only for a case that depends on it."""

    libuv: Callable[[], bool]  # whether the containers' PyTorch is built with it
    other_users: Callable[[], bool]  # whether CRIU can carry processes of users other than root


def not_shown(case: Case, place: Place) -> str:
    """Why a case cannot be tried there; empty: it can."""
    world = case.world
    if world.env.get("CLOCK") == "time":
        return "a watchdog by the wall clock fires after any suspension: real time cannot be virtualised"
    if any(name.startswith("UV_") for name in world.env) and not place.libuv():
        return "PyTorch's store in this root file system is built without libuv"
    if world.uid and not place.other_users():
        return "this machine's root lacks CAP_SYS_RESOURCE, without which CRIU carries no other user's processes"
    return ""


def has_resource_capability(status: str = "") -> bool:
    """By a /proc/PID/status; our own where none is given."""
    found = re.search(r"^CapEff:\s+([0-9a-f]+)", status or Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> CAP_SYS_RESOURCE & 1)


@functools.cache
def has_libuv(rootfs: Path) -> bool:
    command = ["chroot", str(rootfs), "python3", "-B", "-c", LIBUV_PROBE]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "True"
