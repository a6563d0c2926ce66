"""A real kube-apiserver with its etcd, for tests: no nodes, no controllers, just the API."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightkube import Client, codecs
from lightkube.config.kubeconfig import KubeConfig
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.core_v1 import Namespace

REPO = Path(__file__).parents[2]
TOKEN = secrets.token_hex(16)
START = 60.0  # seconds


@dataclass(frozen=True)
class ApiServer:
    """`folder` holds all that it writes; `pid` can be stopped and continued by tests."""

    url: str
    kubeconfig: Path
    folder: Path
    pid: int

    def client(self) -> Client:
        return Client(KubeConfig.from_file(self.kubeconfig).get())


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """From an empty API with our CustomResourceDefinitions on."""
    etcd, kube = (program(name) for name in ("etcd", "kubernetes"))
    folder.mkdir(parents=True, exist_ok=True)
    peers, clients, secure = _free_port(), _free_port(), _free_port()
    store, url = f"http://127.0.0.1:{clients}", f"https://127.0.0.1:{secure}"
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    with contextlib.ExitStack() as running:
        running.enter_context(
            _process(
                folder / "etcd.log",
                [etcd / "bin/server", "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--logger=zap"],
                [f"--listen-client-urls={store}", f"--advertise-client-urls={store}"],
                [
                    f"--listen-peer-urls=http://127.0.0.1:{peers}",
                    f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
                ],
                [f"--initial-cluster=default=http://127.0.0.1:{peers}"],
            )
        )
        server = running.enter_context(
            _process(
                folder / "apiserver.log",
                [kube / "bin/kube-apiserver", f"--etcd-servers={store}", f"--secure-port={secure}"],
                ["--bind-address=127.0.0.1", f"--cert-dir={folder}", "--service-cluster-ip-range=10.97.0.0/16"],
                ["--service-account-issuer=tests", f"--service-account-key-file={key}"],
                [f"--service-account-signing-key-file={key}", f"--token-auth-file={folder}/tokens.csv"],
                ["--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount", "--v=0"],
            )
        )
        api = ApiServer(url, _kubeconfig(folder, url), folder, server.pid)
        _wait(server, api)
        client = api.client()
        for path in sorted((REPO / "crds").glob("*.yaml")):
            for definition in codecs.load_all_yaml(path.read_text()):
                client.create(definition)
                client.wait(CustomResourceDefinition, definition.metadata.name, for_conditions=["Established"])
        yield api


def program(name: str) -> Path:
    """The folder of a program that the e2e cluster pins; it is built the first time."""
    made = subprocess.run([REPO / "e2e/cluster/program.sh", name], check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.split()[-1])


def _kubeconfig(folder: Path, url: str) -> Path:
    path = folder / "kubeconfig"
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def _wait(server: subprocess.Popen[bytes], api: ApiServer) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(Exception):
            api.client().get(Namespace, "default")
            return
        time.sleep(0.1)
    raise AssertionError(f"the API server does not start: {(api.folder / 'apiserver.log').read_text()[-2000:]}")


@contextlib.contextmanager
def _process(log: Path, *command: list[object]) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [str(part) for parts in command for part in parts],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
