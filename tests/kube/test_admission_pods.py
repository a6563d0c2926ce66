"""Pods as the real webhook prepares them behind a real API server."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube import ApiError, Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Secret
from tests.kube.conftest import BUILD, IMAGE, Webhook, make_certificate, make_namespace, until
from tests.kube.objects import pod, policy
from tests.registry.conftest import Registry
from tests.registry.test_registry_images import HTPASSWD, OCI, SECRET, push_image
from tests.support.apiserver import ApiServer

from stasis.api import names
from stasis.core.gate import Stamp

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("webhook")]

STAMP = Stamp("gpt-1", "u1", 1, {0: "10.0.0.7"})
INIT = f"/stasis/{BUILD}/init"


def test_a_pod_is_prepared(client: Client, namespace: str) -> None:
    made = client.create(pod("p", namespace))
    container = made.spec.containers[0]
    assert container.command == [INIT, "run", "--volume", "/stasis", "--grace", "30", "--", "torchrun"]
    assert container.args == ["train.py", "$(HOME)"]
    installer = made.spec.initContainers[-1]
    assert (installer.name, installer.image, installer.command) == (
        "stasis-init",
        IMAGE,
        ["/init", "install", "/stasis"],
    )
    annotations = made.metadata.annotations or {}
    assert (annotations[names.PREPARED], annotations[names.CONTAINER]) == (BUILD, "node")
    assert annotations[names.POD_IP] == ""  # any address: the IPAM step holds it when the pod goes
    assert container.lifecycle.preStop.httpGet.path == f"/prestop/{annotations[names.ID]}"


def test_a_stamped_pod_waits_at_its_ranks_address(client: Client, namespace: str) -> None:
    made = client.create(pod("p", namespace, annotations=STAMP.annotations() | {names.COMPLETION_INDEX: "0"}))
    assert made.spec.containers[0].command[1] == "wait"
    assert made.metadata.annotations[names.POD_IP] == "10.0.0.7"


def test_the_policy_says_which_container(client: Client, namespace: str) -> None:
    client.create(policy("mine", namespace, container="side"))
    made = client.create(pod("p", namespace, label="mine"))
    node, side = made.spec.containers
    assert node.command == ["torchrun"]
    assert side.command[1] == "run"


def test_a_pod_that_cannot_be_prepared_runs_as_it_is_and_says_why(client: Client, namespace: str) -> None:
    made = client.create(pod("p", namespace, shareProcessNamespace=True))
    assert made.spec.containers[0].command == ["torchrun"]
    said = (made.metadata.annotations or {})[names.UNPREPARED]
    assert said == "the pod has shareProcessNamespace. Remedy: leave shareProcessNamespace out"
    missing = client.create(pod("q", namespace, label="no-such-policy"))
    assert "there is no CheckpointPolicy 'no-such-policy'" in missing.metadata.annotations[names.UNPREPARED]


def test_a_placeholder_that_cannot_be_prepared_is_refused(client: Client, namespace: str) -> None:
    with pytest.raises(ApiError, match="cannot be prepared for its restore: the pod has hostIPC"):
        client.create(pod("p", namespace, annotations=STAMP.annotations(), hostIPC=True))


def test_a_prepared_pod_is_not_prepared_twice(client: Client, namespace: str) -> None:
    first = client.create(pod("p", namespace))
    again = pod("q", namespace, annotations=first.metadata.annotations)
    again.spec = first.spec
    second = client.create(again)
    assert second.spec.to_dict() == first.spec.to_dict()
    assert second.metadata.annotations == first.metadata.annotations


def test_no_address_is_asked_for_where_the_policy_translates(client: Client, namespace: str) -> None:
    client.create(policy("far", namespace, addresses="Translate"))
    made = client.create(pod("p", namespace, label="far", annotations=STAMP.annotations()))
    assert names.POD_IP not in made.metadata.annotations


@pytest.mark.parametrize("profile", ["baseline", "restricted"])
def test_a_pod_that_pod_security_admits_is_admitted_prepared(client: Client, profile: str) -> None:
    """Its profiles forbid a hook to the host: the user's own stays, and the agent is not told when the pod ends."""
    namespace = make_namespace(client, **{"pod-security.kubernetes.io/enforce": profile})
    restricted = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    wanted = pod("p", namespace)
    hook = {"preStop": {"exec": {"command": ["drain"]}}}
    for container in wanted.spec.containers:
        container.securityContext = restricted
        container.lifecycle = hook
    made = client.create(wanted)
    assert made.metadata.annotations[names.PREPARED] == BUILD
    assert names.ID not in made.metadata.annotations
    assert made.spec.containers[0].lifecycle.to_dict() == hook


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    auth = f"auth: {{htpasswd: {{realm: tests, path: {tmp_path}/htpasswd}}}}\n"
    registry = Registry(tmp_path, tmp_path / "data", auth=auth).start()
    try:
        push_image(
            registry, "torch", "1", f"{OCI}manifest.v1+json", f"Basic {SECRET}", Entrypoint=["python3"], Cmd=["x"]
        )
        yield registry
    finally:
        registry.stop()


def without_command(namespace: str, name: str, image: str, secret: str) -> Any:
    wanted = pod(name, namespace, imagePullSecrets=[{"name": secret}])
    wanted.spec.containers[0].command = None
    wanted.spec.containers[0].image = image
    return wanted


def test_a_command_that_only_the_image_knows_is_read_with_the_pods_pull_secrets(
    client: Client, namespace: str, registry: Registry
) -> None:
    config = base64.b64encode(json.dumps({"auths": {registry.host: {"auth": SECRET}}}).encode()).decode()
    kind = "kubernetes.io/dockerconfigjson"
    client.create(
        Secret(metadata=ObjectMeta(name="pull", namespace=namespace), type=kind, data={".dockerconfigjson": config})
    )
    image = f"{registry.host}/torch:1"
    made = client.create(without_command(namespace, "p", image, "pull"))
    assert made.spec.containers[0].command[-2:] == ["--", "python3"]  # the pod's own args come after it
    other = client.create(without_command(namespace, "q", image, "no-such-secret"))
    assert other.spec.containers[0].command is None
    assert other.metadata.annotations[names.UNPREPARED] == (
        f"container node has no command, and that of image {image} cannot be read from its registry (Denied)."
        " Remedy: write the command into the TrainJob or its runtime"
    )


def review(webhook: Webhook, path: str, body: bytes) -> tuple[int, Any]:
    """As the API server asks."""
    url = f"https://127.0.0.1:{webhook.port}{path}"
    trusting = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), context=trusting, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"apiVersion":"admission.k8s.io/v1beta1","request":{}}'])
def test_what_is_no_review_is_no_error_of_ours(webhook: Webhook, body: bytes) -> None:
    status, text = review(webhook, "/pods", body)
    assert status == 400, text
    assert webhook.get("/readyz")[0] == 200


def test_calico_is_asked_by_its_own_annotation(api: ApiServer, tmp_path: Path) -> None:
    calico = Webhook(api, tmp_path, STASIS_CNI="calico")
    make_certificate(calico.certificates, 1)
    calico.start()
    try:
        until(calico.ready, "the webhook")
        annotations = STAMP.annotations() | {names.COMPLETION_INDEX: "0"}
        wanted = pod("p", "default", annotations=annotations).to_dict()
        request = {"uid": "1", "kind": {"kind": "Pod"}, "operation": "CREATE", "namespace": "default", "object": wanted}
        asked = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        _, answer = review(calico, "/pods", json.dumps(asked).encode())
        patch = json.loads(base64.b64decode(answer["response"]["patch"]))
        added = {step["path"].rsplit("/", 1)[1]: step["value"] for step in patch if "annotations" in step["path"]}
        assert added["cni.projectcalico.org~1ipAddrs"] == '["10.0.0.7"]'
    finally:
        calico.kill()
