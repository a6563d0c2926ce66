"""A reader's process as the agent has it: started ahead of time, since it takes a while to import what it needs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import stasis
from stasis.store.registry import PLAIN_HTTP

SOURCES = Path(stasis.__file__).parents[1]
BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from stasis.agent.reader.main import main; main()"
# What a registry's client obeys; nothing else of the agent's environment is the reader's.
ENVIRONMENT = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", PLAIN_HTTP)


class Process:
    """It waits for an order on `control` and asks on `broker`; it ends when this object or this process does."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        self.broker, asking = socket.socketpair()
        with theirs, asking:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", BOOT, str(SOURCES), str(theirs.fileno()), str(asking.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), asking.fileno()),
                env=_environment(),
                cwd="/",
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def kill(self) -> None:
        self._child.kill()

    def last_words(self) -> str:
        """Of what it wrote to its standard error."""
        pipe = self._child.stderr
        if pipe is None or pipe.closed:
            return ""
        os.set_blocking(pipe.fileno(), False)
        lines = (pipe.read(1 << 16) or b"").decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def close(self) -> None:
        """End it. Idempotent."""
        self._child.kill()
        self._child.wait()
        self.control.close()
        self.broker.close()
        for pipe in (self._child.stdin, self._child.stderr):
            if pipe is not None:
                pipe.close()


def _environment() -> dict[str, str]:
    names = {name for name in os.environ if name in ENVIRONMENT or name.lower() in ENVIRONMENT}
    return {name: os.environ[name] for name in names} | {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "4"}
