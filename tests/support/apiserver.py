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
from lightkube import ApiError, Client, codecs
from lightkube.config.kubeconfig import KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.core_v1 import Namespace
from tests.support import rights

from stasis.kube.client import Checkpoints, JobSets, Policies, TrainJobs

REPO = Path(__file__).parents[2]
NAMESPACE = "stasis"  # ours
ACCOUNTS = ("controller", "webhook", "agent")  # of the chart
TOKENS = {name: secrets.token_hex(16) for name in ("admin", *ACCOUNTS)}
START = 60.0  # seconds


@dataclass(frozen=True)
class ApiServer:
    """`kubeconfig` is an admin's; `folder` holds all that it writes; `pid` can be stopped and continued by tests."""

    url: str
    kubeconfig: Path
    folder: Path
    pid: int

    def client(self) -> Client:
        return Client(KubeConfig.from_file(self.kubeconfig).get())

    def kubeconfig_of(self, account: str) -> Path:
        """Of one of the chart's ServiceAccounts: it may do what `grant_rights` has granted."""
        return self.folder / f"kubeconfig-{account}"

    @property
    def audit(self) -> Path:
        """The log of what these accounts asked for; `rights` reads it."""
        return self.folder / "audit.log"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """From an empty API with our CustomResourceDefinitions on."""
    etcd, kube = (program(name) for name in ("etcd", "kubernetes"))
    folder.mkdir(parents=True, exist_ok=True)
    peers, clients, secure = free_port(), free_port(), free_port()
    store, url = f"http://127.0.0.1:{clients}", f"https://127.0.0.1:{secure}"
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    accounts = {name: f"system:serviceaccount:{NAMESPACE}:stasis-{name}" for name in ACCOUNTS}
    (folder / "audit.yaml").write_text(yaml.safe_dump(rights.policy(accounts.values())))
    users = {"admin": ("admin", "system:masters")}
    users |= {name: (user, "system:serviceaccounts") for name, user in accounts.items()}
    lines = (f'{TOKENS[name]},{user},{name},"{group}"\n' for name, (user, group) in users.items())
    (folder / "tokens.csv").write_text("".join(lines))
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
                [f"--audit-policy-file={folder}/audit.yaml", f"--audit-log-path={folder}/audit.log"],
            )
        )
        api = ApiServer(url, folder / "kubeconfig", folder, server.pid)
        _kubeconfig(api.kubeconfig, url, "admin")
        for account in ACCOUNTS:
            _kubeconfig(api.kubeconfig_of(account), url, account)
        _wait(server, api)
        client = api.client()
        for path in sorted((REPO / "crds").glob("*.yaml")):
            _define(client, path)
        yield api


def define_training(client: Client) -> None:
    """JobSet's and Trainer's definitions, as their makers ship them; returns when these and ours are served."""
    paths = [
        program("jobset") / "files/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
        *sorted((program("trainer") / "files/base/crds").glob("trainer.*.yaml")),
    ]
    for path in paths:
        _define(client, path)
    end = time.monotonic() + START
    for kind in (TrainJobs, JobSets, Checkpoints, Policies):
        while not _served(client, kind):
            assert time.monotonic() < end, f"{kind.__name__} are not served"
            time.sleep(0.05)


def grant_rights(client: Client) -> None:
    """The chart's roles, to the chart's ServiceAccounts in a namespace made here."""
    client.create(Namespace(metadata=ObjectMeta(name=NAMESPACE)))
    for obj in codecs.load_all_yaml(rendered("rbac")):
        client.create(obj)


def rendered(template: str) -> str:
    """One of the chart's files, with default values."""
    helm = program("helm") / "bin/helm"
    options = ["--namespace", NAMESPACE, "--kube-version", "1.36.3", "-s", f"templates/{template}.yaml"]
    command = [str(helm), "template", "stasis", str(REPO / "charts/stasis"), *options]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return made.stdout


def _define(client: Client, path: Path) -> None:
    for definition in codecs.load_all_yaml(path.read_text()):
        client.create(definition)
        name = definition.metadata.name if definition.metadata else None
        assert name
        client.wait(CustomResourceDefinition, name, for_conditions=["Established"])


def _served(client: Client, kind: Any) -> bool:
    """Established is not yet served: 'storage is (re)initializing'."""
    try:
        return list(client.list(kind, namespace="default")) == []
    except ApiError:
        return False


def program(name: str) -> Path:
    """The folder of a program that the e2e cluster pins; it is built the first time."""
    made = subprocess.run([REPO / "e2e/cluster/program.sh", name], check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.split()[-1])


def _kubeconfig(path: Path, url: str, user: str) -> None:
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": user, "user": {"token": TOKENS[user]}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user}}],
    }
    path.write_text(yaml.safe_dump(config))


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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
