"""The real CRIU, run as the product runs it: from the host, inside the container's namespaces, on a frozen group."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def dump(pid1: int, root: int, group: int, images: Path) -> subprocess.Popen[bytes]:
    """Start a dump of the tree of `root` (its pid in the container) that leaves it as it is. `group`: descriptor."""
    bundle = subprocess.run([TOOLS / "criu.sh"], capture_output=True, text=True, check=True).stdout.strip()
    program, folder = (os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (bundle, images))
    arguments = f"""-t {pid1} -m -n -i -u -p -- /proc/self/fd/{program}/ld-linux-x86-64.so.2
        --library-path /proc/self/fd/{program} /proc/self/fd/{program}/criu dump -t {root} -D /proc/self/fd/{folder}
        --no-default-config --lib /proc/self/fd/{program}/lib --freeze-cgroup /proc/self/fd/{group} --leave-running
        --tcp-established --network-lock skip --manage-cgroups=ignore -v3 -o dump.log"""
    try:
        fds = (program, folder, group)
        return subprocess.Popen(["/usr/bin/nsenter", *arguments.split()], pass_fds=fds, env={}, start_new_session=True)
    finally:
        os.close(program)
        os.close(folder)
