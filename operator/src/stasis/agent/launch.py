"""Start programs inside a container's namespaces and cgroups, with nothing of theirs in the container.

The program and its libraries are reached through descriptors that are open on the host's folders: the magic links of
`/proc/self/fd` lead there from inside the container's mount namespace.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from stasis.errors import RestoreFailed


def enter(
    pid1: int,
    argv: Sequence[str],
    *,
    fds: Sequence[int] = (),
    cgroups: Sequence[Path] = (),
    namespaces: str = "mnipuC",
    env: Mapping[str, str] | None = None,
    output: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Run `argv` in the namespaces of `pid1`, born in `cgroups`, in a process group of its own, with `env` alone.

    `namespaces`: letters of nsenter(1). Descriptors `fds` keep their numbers.
    """
    join = "".join(f'echo $$ > "{folder}/cgroup.procs" && ' for folder in cgroups)
    command = [
        "/bin/sh",
        "-c",
        join + 'exec "$@"',
        "sh",
        "nsenter",
        "-t",
        str(pid1),
        *(f"-{letter}" for letter in namespaces),
        "--",
        *argv,
    ]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=tuple(fds),
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"} if env is None else dict(env),
        start_new_session=True,
    )


def raise_last_pid(pid1: int, pid: int) -> None:
    """Let new processes of the namespace get pids above `pid`: CRIU's helpers must not take those that it restores."""
    writer = enter(pid1, ["/bin/sh", "-c", f"echo {pid + 100} > /proc/sys/kernel/ns_last_pid"], namespaces="p")
    if writer.wait():
        raise RestoreFailed("the last pid of the container's PID namespace cannot be raised")


def wait(process: subprocess.Popen[bytes], timeout: float) -> int:
    """The exit status, at the moment when the program ends: `Popen.wait` with a limit looks every 50 ms, and a frozen
    gang waits meanwhile. Raises subprocess.TimeoutExpired."""
    fd = os.pidfd_open(process.pid)
    try:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        if not ended.poll(timeout * 1000):
            raise subprocess.TimeoutExpired(process.args, timeout)
    finally:
        os.close(fd)
    return process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a program started by `enter` and everything in its process group, and reap it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
