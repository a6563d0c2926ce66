"""The controller's processes."""

from __future__ import annotations

import itertools
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.apiserver import NAMESPACE, REPO, ApiServer, free_port

from stasis.controllers.authority import make_authority, make_leaf, utcnow

LEASE = {"--lease-seconds": "2", "--lease-retry": "0.3"}


class Controllers:
    """The controller's processes, as many as are started; they serve all trainings of a test run."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.port, self.node_port = free_port(), free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._http: dict[int, int] = {}  # PID -> port
        self._networks = itertools.count(1)
        authority = make_authority(utcnow())
        for name in ("controller", "agent"):
            leaf = make_leaf(authority, [f"{name}.stasis.dev"], utcnow())
            files = {"ca.crt": authority.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}
            (folder / name).mkdir(parents=True)
            for file, data in files.items():
                (folder / name / file).write_bytes(data)

    def network(self) -> int:
        """For the addresses of nodes: 127.N.0.0/16."""
        return next(self._networks)

    def tls(self) -> ssl.SSLContext:
        """An agent's."""
        folder = self.folder / "agent"
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return context

    def start(self) -> subprocess.Popen[bytes]:
        """Another one."""
        options = {
            "--repository": f"oci:{self.folder}/store",
            "--namespace": NAMESPACE,
            "--agent-port": self.port,
            "--http-port": (http := free_port()),
            "--certificates": self.folder / "controller",
            "--kubeconfig": self.api.kubeconfig_of("controller"),
            "--log-level": "debug",
            **LEASE,
        }
        with open(self.folder / f"controller-{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "stasis.controllers", *(str(part) for pair in options.items() for part in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(REPO / "operator/src"), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self.processes.append(process)
        self._http[process.pid] = http
        return process

    def metrics(self) -> str:
        """Of the leader."""
        leader = self.leader()
        assert leader is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http[leader.pid]}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def alive(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]

    def only(self, count: int) -> None:
        """Have so many of them."""
        alive = self.alive()
        for process in alive[count:]:
            self.kill(process)
        for _ in range(count - len(alive)):
            self.start()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()

    def leader(self) -> subprocess.Popen[bytes] | None:
        """The one that wrote last that it leads."""
        for process in reversed(self.alive()):
            log = self.folder / f"controller-{self.processes.index(process)}.log"
            text = log.read_text()
            if text.rfind("leads, as") > text.rfind("leads no more"):
                return process
        return None

    def close(self) -> None:
        for process in self.alive():
            self.kill(process)
