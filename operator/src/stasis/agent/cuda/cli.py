"""The driver by NVIDIA's cuda-checkpoint: a process for each call."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping

from stasis.agent.criu import Journal
from stasis.agent.cuda.driver import CudaError, Driver, Patience

_QUOTED = re.compile(r'"(.*)"')
KILLED_SECONDS = 1.0  # in which a killed child ends, unless it hangs in the kernel: then it is left behind


class CliDriver(Driver):
    """`timeouts`: whether this driver knows the option (from 570 on)."""

    name = "cuda-checkpoint"

    def __init__(self, binary: str, env: Mapping[str, str], *, timeouts: bool, journal: Journal) -> None:
        self._binary = binary
        self._env = dict(env)
        self._timeouts = timeouts
        self._journal = journal

    def call(self, call: str, pid: int, patience: Patience, arguments: Mapping[str, object]) -> str:
        command = [self._binary, *([f"--{call}"] if call.startswith("get-") else ["--action", call])]
        command += ["--pid", str(pid)]
        if "timeout" in arguments and self._timeouts:
            command += ["--timeout", str(arguments["timeout"])]
        if isinstance(gpus := arguments.get("gpus"), dict):
            command += ["--device-map", ",".join(f"{old}={new}" for old, new in gpus.items())]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                child = subprocess.Popen(
                    command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as missing:
                raise CudaError(call, pid, f"{self._binary}: {missing.strerror}") from missing
            with self._journal(child.pid):
                pidfd = os.pidfd_open(child.pid)
                try:
                    if not patience.wait(pidfd):
                        end(child)
                        patience.give_up(call, pid)
                finally:
                    os.close(pidfd)
                code = child.wait()
            output.seek(0)
            errors.seek(0)
            said, wrong = output.read().decode(errors="replace"), errors.read().decode(errors="replace")
        if code:
            raise CudaError(call, pid, explain(wrong) or f"{self._binary} ended with status {code}")
        return said.strip()

    def close(self) -> None:
        pass


def explain(text: str) -> str:
    """The cause in what cuda-checkpoint says on standard error."""
    first = text.strip().partition("\n")[0]
    found = _QUOTED.search(first)
    return found[1] if found else first


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILLED_SECONDS)
