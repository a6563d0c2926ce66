"""A real API server with JobSet's, Trainer's and our definitions, and the real webhook behind the chart's own
configuration."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import itertools
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from lightkube import Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.admissionregistration_v1 import MutatingWebhookConfiguration
from lightkube.resources.core_v1 import Namespace
from tests.kube.processes import Controllers
from tests.support import rights
from tests.support.apiserver import REPO, ApiServer, define_training, free_port, grant_rights, rendered, serving

BUILD = "abc123def456"
IMAGE = "registry.test/stasis-init:1"


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with serving(tmp_path_factory.mktemp("api")) as server:
        client = server.client()
        define_training(client)
        grant_rights(client)
        yield server
        assert rights.refused(server.audit) == set(), "the chart's roles are enough"


@pytest.fixture(scope="session")
def client(api: ApiServer) -> Client:
    return api.client()


_count = itertools.count()


@pytest.fixture
def namespace(client: Client) -> str:
    """One of its own for a test."""
    return make_namespace(client)


def make_namespace(client: Client, **labels: str) -> str:
    name = f"test-{next(_count)}"
    client.create(Namespace(metadata=ObjectMeta(name=name, labels=labels)))
    return name


def until(seen: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < end, f"not seen: {what}"
        time.sleep(0.05)


def make_certificate(folder: Path, serial: int) -> str:
    """tls.crt and tls.key for 127.0.0.1, as a mounted Secret; the certificate is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "webhook.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), serial)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    folder.mkdir(exist_ok=True)
    for file, data in (("tls.key", private), ("tls.crt", certificate)):
        (folder / f".{file}").write_bytes(data)
        (folder / f".{file}").rename(folder / file)
    return base64.b64encode(certificate).decode()


class Webhook:
    """The webhook's process."""

    def __init__(self, api: ApiServer, folder: Path, **env: str) -> None:
        self.folder, self.port, self.metrics_port = folder, free_port(), free_port()
        self.certificates, self.log = folder / "tls", folder / "log"
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(REPO / "operator/src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "KUBECONFIG": str(api.kubeconfig_of("webhook")),
            "STASIS_INIT_IMAGE": IMAGE,
            "STASIS_INIT_BUILD": BUILD,
            "STASIS_CERTIFICATES": str(self.certificates),
            "STASIS_ADDRESS": "127.0.0.1",
            "STASIS_PORT": str(self.port),
            "STASIS_METRICS_PORT": str(self.metrics_port),
            **env,
        }

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "stasis.webhook"], env=self._env, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        """From the plain port; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.get("/readyz")[0] == 200


@pytest.fixture(scope="session")
def webhook(api: ApiServer, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """Serving, and registered as the chart registers it."""
    webhook = Webhook(api, tmp_path_factory.mktemp("webhook"))
    authority = make_certificate(webhook.certificates, 1)
    webhook.start()
    try:
        until(webhook.ready, "the webhook")
        client.create(configuration(webhook.port, authority))
        until(lambda: _active(client), "the registration's effect")
        yield webhook
    finally:
        webhook.kill()


def configuration(port: int, authority: str) -> MutatingWebhookConfiguration:
    """The chart's, but for where the webhook is."""
    found = yaml.safe_load(rendered("webhook-configuration"))
    for entry in found["webhooks"]:
        path = entry["clientConfig"].pop("service")["path"]
        entry["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
    return MutatingWebhookConfiguration.from_dict(found)


def _active(client: Client) -> bool:
    """The API server takes up a configuration a little after it was made."""
    from tests.kube.objects import trainjob  # of objects that need this module

    probe = trainjob("probe", "default", label="default")
    with contextlib.suppress(Exception):
        client.delete(type(probe), "probe", namespace="default")
    return bool(client.create(probe)["spec"].get("runtimePatches"))


@pytest.fixture(scope="module")
def controllers(api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    """None runs yet, and none after the module: others play the controller themselves."""
    controllers = Controllers(api, tmp_path_factory.mktemp("controllers"))
    yield controllers
    controllers.close()
