"""The daemon as a process, and certificates as the cluster's controller makes them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.support.apiserver import ApiServer

GONE = 30.0  # seconds in which what is killed must be gone


class Authority:
    """Certificates as the cluster's controller makes them."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("stasis-ca")
        self.certificate = self._sign(self._name, self._key.public_key(), [], authority=True)

    def folder(self, path: Path, name: str) -> Path:
        """ca.crt, tls.crt and tls.key of `name`."""
        path.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_named(name), key.public_key(), [x509.DNSName(name)])
        encoding = serialization.Encoding.PEM
        (path / "ca.crt").write_bytes(self.certificate.public_bytes(encoding))
        (path / "tls.crt").write_bytes(certificate.public_bytes(encoding))
        (path / "tls.key").write_bytes(
            key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return path

    def _sign(
        self, name: x509.Name, key: Any, names: list[x509.GeneralName], *, authority: bool = False
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def context(folder: Path) -> ssl.SSLContext:
    """A client's, with the certificate in the folder, if there is one."""
    if not folder.exists():
        return ssl._create_unverified_context()
    found = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    found.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return found


class Daemon:
    """The agent's process. `start` after `kill` is the restart that kubelet would make."""

    def __init__(self, folder: Path, api: ApiServer, authority: Authority) -> None:
        self.folder = folder
        self.kept = 0
        self.state = folder / "state"
        self.certificates = authority.folder(folder / "agent", "agent.stasis.dev")
        self.log = folder / "daemon.log"
        self._api = api
        self.port, self.node_port, self.metrics_port = _free_port(), _free_port(), _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = {
            "--node": "here",
            "--state": self.state,
            "--certificates": self.certificates,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--node-port": self.node_port,
            "--metrics-port": self.metrics_port,
            "--kubeconfig": self._api.kubeconfig,
            "--kept": self.kept,
        }
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stasis.daemon", *(str(part) for option in options.items() for part in option)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert until(lambda: self.process is not None and (self._answers() or self.process.poll() is not None))
        assert self.process.poll() is None, self.tail()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return self.get("/healthz") == "ok\n"
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """As kubelet does after a death."""
        self.kill()
        self.start()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()

    def get(self, path: str, port: int = 0) -> str:
        """Of its port for kubelet, or another."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port or self.node_port}{path}", timeout=GONE) as answer:
            return str(answer.read().decode())

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until(done: Callable[[], Any], timeout: float = 30.0) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.005)
    return False
