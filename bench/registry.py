"""The real docker-registry on this machine, and a sink of limited speed in front of it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.measure import ToolFailed

CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}", secret: bench}}
"""


class Server:
    """A program that listens on a port of 127.0.0.1. Use as a context manager."""

    def __init__(self, command: Callable[[int], list[str]], folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.host = f"127.0.0.1:{self.port}"
        self._command = command(self.port)
        self._log = folder / f"{Path(self._command[0]).name}-{self.port}.log"

    def __enter__(self) -> Server:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            time.sleep(0.02)
        self.__exit__()
        raise ToolFailed(f"{self._command[0]} does not listen: {self._log.read_text()[-500:]}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def registry(folder: Path) -> Server:
    """docker-registry with its data in `folder`."""

    def command(port: int) -> list[str]:
        config = folder / "registry.yml"
        config.write_text(CONFIG.format(root=folder / "registry", port=port))
        return ["docker-registry", "serve", str(config)]

    folder.mkdir(parents=True, exist_ok=True)
    return Server(command, folder)


def forget(folder: Path) -> None:
    """Delete all that the registry holds: it reads its folder anew for each request."""
    shutil.rmtree(folder / "registry", ignore_errors=True)


def throttled(folder: Path, target: int, rate: float) -> Server:
    """Forwards to the port `target`, what clients send at `rate` bytes a second in all."""
    program = Path(__file__).with_name("throttle.py")
    return Server(lambda port: [sys.executable, str(program), str(port), str(target), str(rate)], folder)
