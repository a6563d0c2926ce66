"""The installation's certificates: Secrets that the leader makes and rotates, and the trust in our webhook.

An authority is replaced in two steps, so that nobody ever meets a certificate of one that is unknown to him: the next
one is published in every `ca.crt` long before it signs, the former one for as long as its leaves may live.
"""

from __future__ import annotations

import base64
import logging
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from lightkube import AsyncClient
from lightkube.types import PatchType

from stasis.controllers.authority import Pair, is_current, left, make_authority, make_leaf, utcnow
from stasis.errors import NotFound, Unavailable
from stasis.kube.client import MutatingWebhookConfigurations, Secrets, meta, translated

log = logging.getLogger(__name__)

AUTHORITY = "stasis-ca"
CONTROLLER = "stasis-controller-tls"
WEBHOOK = "stasis-webhook-tls"
CONFIGURATION = "stasis"  # the MutatingWebhookConfiguration
LOOK = 3600.0  # seconds between two looks
PUBLISHED = timedelta(days=1)  # for which the next authority is known before it signs
RENEW = 0.1  # part of the authority's life that is left when the next one is made
TLS_TYPE = "kubernetes.io/tls"

Data = dict[str, bytes]


@dataclass(frozen=True)
class _Secret:
    """`version` empty where there is none."""

    data: Data
    version: str


class Certificates:
    """`ensure` sees that all Secrets are there and current; `context` is this process's own, for the agents."""

    def __init__(self, client: AsyncClient, namespace: str, *, webhook: bool) -> None:
        self._client = client
        self._namespace = namespace
        self._webhook = webhook  # whether the webhook's is ours to make
        self._own: ssl.SSLContext | None = None
        self._own_data: Data = {}

    def context(self) -> ssl.SSLContext:
        """Raises Unavailable before the first `ensure`."""
        if self._own is None:
            raise Unavailable("no certificate yet")
        return self._own

    @property
    def expiry(self) -> float | None:
        """When our certificate ends, in seconds since 1970; None where we have none."""
        leaf = self._own_data.get("tls.crt")
        return x509.load_pem_x509_certificate(leaf).not_valid_after_utc.timestamp() if leaf else None

    async def ensure(self) -> None:
        """Raises Unavailable or Denied; Conflict where another leader was at it."""
        now = utcnow()
        authority, bundle = await self._authority(now)
        for name, dns in self._leaves().items():
            data = await self._leaf(name, dns, authority, bundle, now)
            if name == CONTROLLER and data != self._own_data:
                self._own, self._own_data = client_context(data), data
        if self._webhook:
            await self._trust(bundle)

    def _leaves(self) -> Mapping[str, list[str]]:
        def service(name: str) -> list[str]:
            return [f"{name}.{self._namespace}.svc", f"{name}.{self._namespace}.svc.cluster.local"]

        leaves = {
            CONTROLLER: ["controller.stasis.dev"],
            "stasis-agent-tls": ["agent.stasis.dev"],
            "stasis-registry-tls": service("stasis-registry"),
        }
        return leaves | ({WEBHOOK: service("stasis-webhook")} if self._webhook else {})

    async def _authority(self, now: datetime) -> tuple[Pair, bytes]:
        """The one that signs, and all that are trusted, PEM."""
        before = await self._read(AUTHORITY)
        after = rotated(before.data, now)
        await self._write(AUTHORITY, before, after, "Opaque")
        return Pair(after["tls.crt"], after["tls.key"]), bundle_of(after)

    async def _leaf(self, name: str, dns: list[str], authority: Pair, bundle: bytes, now: datetime) -> Data:
        before = await self._read(name)
        pair = Pair(before.data.get("tls.crt", b""), before.data.get("tls.key", b""))
        if not is_current(pair.certificate, authority, dns, now):
            pair = make_leaf(authority, dns, now)
            log.info("made a certificate: %s", name)
        after = {"ca.crt": bundle, "tls.crt": pair.certificate, "tls.key": pair.key}
        await self._write(name, before, after, TLS_TYPE)
        return after

    async def _read(self, name: str) -> _Secret:
        try:
            with translated(f"secret {name}"):
                secret = await self._client.get(Secrets, name, namespace=self._namespace)
        except NotFound:
            return _Secret({}, "")
        data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        return _Secret(data, str(meta(secret)["resourceVersion"]))

    async def _write(self, name: str, before: _Secret, after: Data, kind: str) -> None:
        if before.data == after:
            return
        data: dict[str, Any] = {key: base64.b64encode(value).decode() for key, value in after.items()}
        with translated(f"secret {name}"):
            if before.version:
                data |= dict.fromkeys(set(before.data) - set(after))
                change = {"metadata": {"resourceVersion": before.version}, "data": data}
                await self._client.patch(Secrets, name, change, namespace=self._namespace, patch_type=PatchType.MERGE)
            else:
                about = {"name": name, "namespace": self._namespace}
                await self._client.create(Secrets.from_dict({"metadata": about, "type": kind, "data": data}))

    async def _trust(self, bundle: bytes) -> None:
        """Have the API server trust the webhook's certificate."""
        text = base64.b64encode(bundle).decode()
        try:
            with translated("webhook configuration"):
                found = await self._client.get(MutatingWebhookConfigurations, CONFIGURATION)
        except NotFound:
            return
        wrong = [i for i, w in enumerate(found.get("webhooks") or ()) if w["clientConfig"].get("caBundle") != text]
        if not wrong:
            return
        change = [{"op": "test", "path": "/metadata/resourceVersion", "value": meta(found)["resourceVersion"]}]
        change += [{"op": "add", "path": f"/webhooks/{i}/clientConfig/caBundle", "value": text} for i in wrong]
        with translated("webhook configuration"):
            await self._client.patch(MutatingWebhookConfigurations, CONFIGURATION, change, patch_type=PatchType.JSON)
        log.info("the API server trusts the webhook")


def rotated(data: Data, now: datetime) -> Data:
    """The authority's Secret as it should be now: `tls.*` signs, `next.*` will, `former.crt` has."""
    if "tls.crt" not in data:
        pair = make_authority(now)
        return {"tls.crt": pair.certificate, "tls.key": pair.key}
    signing = Pair(data["tls.crt"], data["tls.key"])
    if left(signing.parsed, now) > RENEW:
        return data
    if "next.crt" not in data:
        pair = make_authority(now)
        return {**data, "next.crt": pair.certificate, "next.key": pair.key}
    following = Pair(data["next.crt"], data["next.key"])
    if now - following.parsed.not_valid_before_utc < PUBLISHED:
        return data
    return {"tls.crt": following.certificate, "tls.key": following.key, "former.crt": signing.certificate}


def bundle_of(data: Data) -> bytes:
    """All authorities that are trusted, PEM."""
    return b"".join(data[name] for name in ("tls.crt", "next.crt", "former.crt") if name in data)


def client_context(data: Data) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=data["ca.crt"].decode())
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:  # the ssl module reads keys from files only
        path = Path(folder, "pair.pem")
        path.touch(mode=0o600)
        path.write_bytes(data["tls.key"] + data["tls.crt"])
        context.load_cert_chain(path)
    return context


def read_folder(path: Path) -> Data:
    """Certificates that somebody else makes, in a folder as a Secret is mounted."""
    return {name: (path / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")}
