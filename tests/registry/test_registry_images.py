"""An image's command read from its registry, with a pod's pull secrets."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from stasis.errors import Denied, NotFound, StasisError, Unavailable
from stasis.webhook.images import Entry, Image, Images

from .conftest import Registry

pytestmark = pytest.mark.registry

OCI = "application/vnd.oci.image."
DOCKER = "application/vnd.docker.distribution.manifest."


def push(registry: Registry, name: str, reference: str, body: Any, kind: str, auth: str = "") -> dict[str, Any]:
    """A manifest; its descriptor."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": kind} | ({"Authorization": auth} if auth else {})
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    request(registry, "PUT", f"/v2/{name}/manifests/{reference or digest}", data, headers)
    return {"mediaType": kind, "digest": digest, "size": len(data)}


def push_blob(registry: Registry, name: str, body: Any, auth: str = "") -> dict[str, Any]:
    data = json.dumps(body).encode()
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    headers = {"Authorization": auth} if auth else {}
    where = request(registry, "POST", f"/v2/{name}/blobs/uploads/", b"", headers)
    request(registry, "PUT", f"{where}&digest={digest}", data, headers)
    return {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": digest, "size": len(data)}


def request(registry: Registry, method: str, url: str, data: bytes, headers: dict[str, str]) -> str:
    connection = HTTPConnection("127.0.0.1", registry.port)
    connection.request(method, url, data, headers)
    answer = connection.getresponse()
    assert answer.status in (201, 202), answer.read()
    return answer.headers["Location"]


def push_image(registry: Registry, name: str, tag: str, kind: str, auth: str = "", **config: Any) -> dict[str, Any]:
    body = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": []}}
    descriptor = push_blob(registry, name, body, auth)
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": descriptor, "layers": []}
    return push(registry, name, tag, manifest, kind, auth)


def entry(image: str, *configs: dict[str, Any], images: Images | None = None, arch: str = "") -> Entry:
    return asyncio.run((images or Images()).entry(image, configs, arch))


@pytest.mark.parametrize("kind", [f"{OCI}manifest.v1+json", f"{DOCKER}v2+json"])
def test_entrypoint_and_cmd_by_tag_and_by_digest(registry: Registry, kind: str) -> None:
    made = push_image(registry, "team/torch", "1", kind, Entrypoint=["/entry"], Cmd=["a", "b"])
    for reference in (":1", "@" + made["digest"], ":1@" + made["digest"]):
        assert entry(f"{registry.host}/team/torch{reference}") == Entry(("/entry",), ("a", "b"))


@pytest.mark.parametrize("index", [f"{OCI}index.v1+json", f"{DOCKER}list.v2+json"])
def test_of_an_image_for_several_platforms_the_pods_counts(registry: Registry, index: str) -> None:
    kind = f"{OCI}manifest.v1+json" if index.startswith(OCI) else f"{DOCKER}v2+json"
    listed = []
    for arch in ("amd64", "arm64"):
        made = push_image(registry, "torch", "", kind, Cmd=[arch])
        listed.append(made | {"platform": {"os": "linux", "architecture": arch}})
    push(registry, "torch", "latest", {"schemaVersion": 2, "mediaType": index, "manifests": listed}, index)
    for arch in ("amd64", "arm64"):
        assert entry(f"{registry.host}/torch", arch=arch) == Entry((), (arch,))


def test_no_such_image(registry: Registry) -> None:
    with pytest.raises(NotFound):
        entry(f"{registry.host}/no-such:1")


# "open sesame" by bcrypt
HTPASSWD = "alibaba:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"
SECRET = base64.b64encode(b"alibaba:open sesame").decode()


@pytest.fixture
def private(make_registry: Callable[..., Registry], tmp_path: Path) -> Registry:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    registry = make_registry(auth=f"auth: {{htpasswd: {{realm: tests, path: {tmp_path}/htpasswd}}}}\n")
    push_image(registry, "team/torch", "1", f"{OCI}manifest.v1+json", f"Basic {SECRET}", Cmd=["mine"])
    return registry


@pytest.mark.parametrize("key", ["{host}", "https://{host}/v2/", "{host}/team", "http://{host}"])
@pytest.mark.parametrize("good", [{"auth": SECRET}, {"username": "alibaba", "password": "open sesame"}])
def test_a_pull_secret_opens_a_private_registry(private: Registry, key: str, good: dict[str, str]) -> None:
    bad = {"auths": {key.format(host=private.host): {"auth": base64.b64encode(b"alibaba:wrong").decode()}}}
    config = {"auths": {"other.example": {"auth": "x"}, key.format(host=private.host): good}}
    assert entry(f"{private.host}/team/torch:1", bad, config) == Entry((), ("mine",))


def test_what_one_tenant_may_read_another_may_not(private: Registry) -> None:
    images, image = Images(), f"{private.host}/team/torch:1"
    config = {"auths": {private.host: {"auth": SECRET}}}

    async def both() -> None:
        assert await images.entry(image, [config]) == Entry((), ("mine",))
        with pytest.raises(Denied):
            await images.entry(image, [{"auths": {f"{private.host}/other": {"auth": SECRET}}}])

    asyncio.run(both())


def test_a_registry_that_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match=r"no answer in 2 s|timed out"):
            entry(f"127.0.0.1:{server.getsockname()[1]}/torch:1")
        assert time.monotonic() - begun < 8  # hung for ever without a limit


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("python", ("docker.io", "library/python", "latest")),
        ("user/tool:2", ("docker.io", "user/tool", "2")),
        ("index.docker.io/library/python:3", ("docker.io", "library/python", "3")),
        ("localhost/x", ("localhost", "x", "latest")),
        ("reg.example:5000/a/b:t", ("reg.example:5000", "a/b", "t")),
        ("reg.example/a:t@sha256:" + 64 * "0", ("reg.example", "a", "sha256:" + 64 * "0")),
    ],
)
def test_a_name_of_an_image_as_runtimes_read_it(text: str, image: tuple[str, str, str]) -> None:
    assert Image.parse(text) == Image(*image)


@pytest.mark.parametrize(
    "text", ["", "A/B:", "reg.example/../x", "reg.example/a@sha256:12", "a b", "u:p@reg.example/x"]
)
def test_what_names_no_image(text: str) -> None:
    with pytest.raises(StasisError):
        Image.parse(text)
