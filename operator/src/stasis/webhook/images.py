"""What an image's config says to run, for pods that do not say it themselves. Asked of the image's registry with the
pod's pull secrets, as kubelet does; the config is kept by its digest, whoever may read the manifest that names it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stasis.errors import Denied, NotFound, StasisError, Unavailable
from stasis.store.credentials import Credentials
from stasis.store.http import Client, HttpOptions
from stasis.store.media import digest_of
from stasis.store.reference import DIGEST

SECONDS = 2.0
_KNOWN = 1000  # configs
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_ACCEPT = {"Accept": ", ".join((*_MANIFESTS, *_INDEXES))}
_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?|\[[0-9A-Fa-f:]+\](:[0-9]+)?")
_NAME = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


@dataclass(frozen=True)
class Image:
    host: str
    name: str
    reference: str  # tag or digest

    @classmethod
    def parse(cls, text: str) -> Image:
        """As container runtimes read it. Raises NotFound for what names no image."""
        rest, _, digest = text.partition("@")
        host, slash, name = rest.partition("/")
        if not slash or not ("." in host or ":" in host or host == "localhost"):
            host, name = "docker.io", rest if slash else f"library/{rest}"
        head, colon, tag = name.rpartition(":")
        if colon:
            name = head
        if host in ("index.docker.io", "registry-1.docker.io"):
            host = "docker.io"
        if not _HOST.fullmatch(host) or not _NAME.fullmatch(name) or (digest and not DIGEST.fullmatch(digest)):
            raise NotFound(f"{text!r:.200} names no image")
        return cls(host, name, digest or (tag if colon else "latest"))


@dataclass(frozen=True)
class Entry:
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class Images:
    """`plain_http`: registries without TLS, beside those on this machine."""

    def __init__(self, plain_http: Sequence[str] = ()) -> None:
        self._plain = frozenset(plain_http)
        self._configs: dict[str, Entry] = {}
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="images")

    async def entry(self, image: str, configs: Sequence[Mapping[str, Any]], arch: str = "") -> Entry:
        """`configs`: contents of the pull secrets. Raises a StasisError where there is no answer in two seconds."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._entry, image, configs, arch)
        try:
            return await asyncio.wait_for(asyncio.shield(work), SECONDS)
        except TimeoutError:
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # its answer serves the next one
            raise Unavailable(f"no answer in {SECONDS:g} s") from None

    def _entry(self, image: str, configs: Sequence[Mapping[str, Any]], arch: str) -> Entry:
        at = Image.parse(image)
        options = HttpOptions(connect_timeout=SECONDS, read_timeout=SECONDS, patience=0)
        plain = True if at.host in self._plain else None
        found: list[Credentials | None] = [*_credentials(configs, at.host, at.name), None]
        error: StasisError = NotFound(image)
        for credentials in found:
            client = Client(at.host, _giving(credentials), plain=plain, options=options)
            try:
                return self._ask(client, f"/v2/{at.name}", at.reference, arch or _ARCH.get(platform.machine(), ""))
            except (Denied, NotFound) as refusal:
                error = refusal
            finally:
                client.close()
        raise error

    def _ask(self, client: Client, at: str, reference: str, arch: str) -> Entry:
        manifest = _json(client, f"{at}/manifests/{reference}")
        if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
            listed = [m for m in manifest["manifests"] if (m.get("platform") or {}).get("os", "linux") == "linux"]
            fitting = [m for m in listed if (m.get("platform") or {}).get("architecture") == arch] or listed
            if not fitting:
                raise NotFound("the image is not for this platform")
            manifest = _json(client, f"{at}/manifests/{_digest(fitting[0])}")
        digest = _digest(manifest.get("config") or {})
        if digest not in self._configs:
            config = _json(client, f"{at}/blobs/{digest}", digest).get("config") or {}
            words = [tuple(str(word) for word in config.get(key) or ()) for key in ("Entrypoint", "Cmd")]
            self._configs = dict(list(self._configs.items())[1 - _KNOWN :]) | {digest: Entry(*words)}
        return self._configs[digest]


def _json(client: Client, url: str, digest: str = "") -> dict[str, Any]:
    body = client.request("GET", url, headers=_ACCEPT).body
    if digest and digest_of(body) != digest:
        raise NotFound(f"{digest} has other bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise NotFound("the registry's answer is no JSON object")
    return value


def _digest(descriptor: Mapping[str, Any]) -> str:
    digest = str(descriptor.get("digest", ""))
    if not DIGEST.fullmatch(digest):
        raise NotFound("the image's manifest names no digest")
    return digest


def _giving(credentials: Credentials | None) -> Callable[[], Credentials | None]:
    return lambda: credentials


def _credentials(configs: Sequence[Mapping[str, Any]], host: str, name: str) -> list[Credentials]:
    """Those of pull secrets for this repository, the narrowest first. Credential helpers are not run: a tenant names
    them."""
    found: list[tuple[int, Credentials]] = []
    for config in configs:
        auths = config.get("auths")
        for key, entry in auths.items() if isinstance(auths, dict) else ():
            key = re.sub(r"^https?://|/v[12]/?$|/$", "", re.sub(r"^https?://", "", key))
            key = re.sub(r"^(index|registry-1)\.docker\.io", "docker.io", key)
            if f"{host}/{name}/".startswith(f"{key}/") and isinstance(entry, dict) and (one := _credential(entry)):
                found.append((len(key), one))
    return [one for _, one in sorted(found, key=lambda item: -item[0])]


def _credential(entry: Mapping[str, Any]) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials(identity_token=str(token))
    if entry.get("username"):
        return Credentials(str(entry["username"]), str(entry.get("password", "")))
    try:
        user, colon, password = base64.b64decode(str(entry.get("auth", ""))).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return Credentials(user, password) if colon else None
