"""The fingerprint of this machine and of the init that a container runs."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
from functools import lru_cache
from pathlib import Path

from stasis.core.fingerprint import Fingerprint
from stasis.errors import Unsupported

_AT_MINSIGSTKSZ = 51


def read(bundle: Path, init: int, image: str = "") -> Fingerprint:
    """`bundle`: of CRIU; `init`: a process that runs our init (the keeper, or a placeholder's PID 1); `image`: what
    the caller knows of the container's image. ProcessLookupError: `init` is gone."""
    text = Path("/proc/cpuinfo").read_text()
    machine = os.uname()
    return Fingerprint(
        architecture=machine.machine,
        kernel=machine.release,
        cpu_vendor=_field(text, "vendor_id", "CPU implementer"),
        cpu_model=_field(text, "model name", "CPU part"),
        cpu_flags=tuple(sorted(_field(text, "flags", "Features").split())),
        signal_frame=_auxiliary().get(_AT_MINSIGSTKSZ, 0),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        clock_ticks=os.sysconf("SC_CLK_TCK"),
        criu=criu_version(bundle),
        init=digest_of_program(init),
        image=image,
    )


@lru_cache
def criu_version(bundle: Path) -> str:
    """Unsupported: the bundle does not run here."""
    loader = next(bundle.glob("ld-linux*"), bundle / "ld-linux")
    command: list[str | Path] = [loader, "--library-path", bundle, bundle / "criu", "--no-default-config", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env={})
    found = re.search(r"^Version: (\S+)$", done.stdout, re.MULTILINE)
    if not found:
        raise Unsupported(f"the CRIU in {bundle} does not run: {done.stderr.strip()}", remedy="build it: tools/criu.sh")
    return found[1]


def digest_of_program(pid: int) -> str:
    """Of the very file that the process runs, also where it was replaced since."""
    try:
        with open(f"/proc/{pid}/exe", "rb") as program:
            return f"sha256:{hashlib.file_digest(program, 'sha256').hexdigest()}"
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"process {pid} is gone") from gone


def _field(text: str, *names: str) -> str:
    """Of the first CPU; the names differ between architectures."""
    found = re.search(rf"^(?:{'|'.join(names)})\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _auxiliary() -> dict[int, int]:
    """The vector that the kernel gives every program: number -> value."""
    data = Path("/proc/self/auxv").read_bytes()
    return dict(struct.iter_unpack("@LL", data))
