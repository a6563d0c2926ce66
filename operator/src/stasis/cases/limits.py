"""What a machine cannot show: cases that say nothing about Stasis here, each with its reason."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

from stasis.cases.spec import Case

CAP_SYS_RESOURCE = 24
_PROBE = """
import torch.distributed
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
print(store.libuvBackend)
"""


def not_shown(case: Case, rootfs: Path) -> str:
    """Why a case cannot be tried here; empty: it can."""
    world = case.world
    if world.env.get("CLOCK") == "time":
        return "a watchdog by the wall clock fires after any suspension: real time cannot be virtualised"
    if any(name.startswith("UV_") for name in world.env) and not _has_libuv(rootfs):
        return "PyTorch's store in this root file system is built without libuv"
    if world.uid and not has_resource_capability() and not os.environ.get("STASIS_CRIU_PRELOAD"):
        return "this machine's root lacks CAP_SYS_RESOURCE, without which CRIU carries no other user's processes"
    return ""


def has_resource_capability() -> bool:
    found = re.search(r"^CapEff:\s+([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> CAP_SYS_RESOURCE & 1)


@functools.cache
def _has_libuv(rootfs: Path) -> bool:
    command = ["chroot", str(rootfs), "python3", "-B", "-c", _PROBE]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "True"
