"""The installation's certificates, in real Secrets: made, renewed, and replaced with nobody left outside."""

from __future__ import annotations

import asyncio
import base64
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from lightkube import Client
from lightkube.models.meta_v1 import LabelSelector
from tests.kube.conftest import configuration
from tests.support.apiserver import ApiServer

from stasis.controllers import authority, certificates
from stasis.controllers.certificates import Certificates, bundle_of, rotated
from stasis.kube.client import MutatingWebhookConfigurations, Secrets, connect_async
from stasis.kube.client import configuration as of_cluster

pytestmark = pytest.mark.kube
NOW = authority.utcnow()
LEAVES = ["stasis-agent-tls", "stasis-controller-tls", "stasis-registry-tls", "stasis-webhook-tls"]


@pytest.fixture(autouse=True)
def configuration_of_our_own(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests' webhook keeps the authority that it was registered with."""
    monkeypatch.setattr(certificates, "CONFIGURATION", f"{namespace}-stasis")


def secret(client: Client, namespace: str, name: str) -> dict[str, bytes]:
    found = client.get(Secrets, name, namespace=namespace)
    return {key: base64.b64decode(value) for key, value in found["data"].items()}


def ensure(api: ApiServer, namespace: str, times: int = 1) -> Certificates:
    async def run() -> Certificates:
        made = Certificates(connect_async(of_cluster(api.kubeconfig)), namespace, webhook=True)
        for _ in range(times):
            await made.ensure()
        return made

    return asyncio.run(run())


def handshake(server: dict[str, bytes], client: ssl.SSLContext, name: str, folder: Path) -> str:
    """Common name of the client as the server sees it. Raises ssl.SSLError where one does not trust the other."""
    for file, data in server.items():
        (folder / file).write_bytes(data)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=name)
    there = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(6):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    subject = dict(pair[0] for pair in there.getpeercert()["subject"])  # type: ignore[index]
    return str(subject["commonName"])


def test_agents_and_controller_trust_each_other_and_nobody_else(
    api: ApiServer, client: Client, namespace: str, tmp_path: Path
) -> None:
    made = ensure(api, namespace)
    agent = secret(client, namespace, "stasis-agent-tls")
    assert handshake(agent, made.context(), "agent.stasis.dev", tmp_path) == "controller.stasis.dev"
    other = authority.make_authority(NOW)
    stranger = authority.make_leaf(other, ["controller.stasis.dev"], NOW)
    data = {"ca.crt": agent["ca.crt"], "tls.crt": stranger.certificate, "tls.key": stranger.key}
    with pytest.raises(ssl.SSLError):
        handshake(agent, certificates.client_context(data), "agent.stasis.dev", tmp_path)


def test_what_is_there_and_current_stays(api: ApiServer, client: Client, namespace: str) -> None:
    ensure(api, namespace)
    before = {name: secret(client, namespace, name) for name in ["stasis-ca", *LEAVES]}
    ensure(api, namespace, times=2)
    assert {name: secret(client, namespace, name) for name in ["stasis-ca", *LEAVES]} == before
    names = x509.load_pem_x509_certificate(before["stasis-webhook-tls"]["tls.crt"]).extensions
    dns = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert f"stasis-webhook.{namespace}.svc" in dns


def test_the_api_server_is_told_whom_to_trust(api: ApiServer, client: Client, namespace: str) -> None:
    name = certificates.CONFIGURATION
    wanted = configuration(1, base64.b64encode(b"-").decode())
    assert wanted.metadata is not None
    wanted.metadata.name = name
    for webhook in wanted.webhooks or []:
        webhook.namespaceSelector = LabelSelector(matchLabels={"nowhere": "at-all"})
        webhook.clientConfig.caBundle = None
    client.create(wanted)
    ensure(api, namespace)
    found = client.get(MutatingWebhookConfigurations, name)
    client.delete(MutatingWebhookConfigurations, name)
    bundle = secret(client, namespace, "stasis-webhook-tls")["ca.crt"]
    assert {base64.b64decode(w["clientConfig"]["caBundle"]) for w in found["webhooks"]} == {bundle}


def test_an_authority_is_replaced_without_anyone_who_does_not_know_it() -> None:
    data = rotated({}, NOW)
    late = NOW + authority.AUTHORITY_LIFE * 0.95
    published = rotated(data, late)
    assert published["tls.crt"] == data["tls.crt"]
    assert bundle_of(published) == data["tls.crt"] + published["next.crt"]
    assert rotated(published, late + timedelta(hours=1)) == published
    replaced = rotated(published, late + timedelta(days=2))
    assert replaced["tls.crt"] == published["next.crt"]
    assert bundle_of(replaced) == published["next.crt"] + data["tls.crt"]
    assert rotated(replaced, late + timedelta(days=3)) == replaced


def test_a_leaf_is_renewed_in_the_last_third_of_its_life() -> None:
    signer = authority.make_authority(NOW)
    leaf = authority.make_leaf(signer, ["a"], NOW)
    assert authority.is_current(leaf.certificate, signer, ["a"], NOW + authority.LEAF_LIFE * 0.6)
    assert not authority.is_current(leaf.certificate, signer, ["a"], NOW + authority.LEAF_LIFE * 0.7)
    assert not authority.is_current(leaf.certificate, signer, ["b"], NOW)
    assert not authority.is_current(leaf.certificate, authority.make_authority(NOW), ["a"], NOW)
    assert not authority.is_current(b"", signer, ["a"], NOW)
