"""Pods prepared, whatever they have."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from stasis.errors import UsageError
from stasis.webhook.containers import is_prepared, prepare
from stasis.webhook.images import Entry
from stasis.webhook.pods import refuse
from stasis.webhook.settings import InitSettings

SETTINGS = InitSettings("registry.test/init:1", "abc")
INIT = "/stasis/abc/init"
RUN = [INIT, "run", "--volume", "/stasis", "--grace", "30"]


def prepared(
    container: dict[str, Any] | None = None,
    *,
    entry: Entry | None = None,
    waits: bool = False,
    identity: str = "id1",
    **spec: Any,
) -> dict[str, Any]:
    """The pod's spec; its first container is the prepared one."""
    node = {"name": "node", "image": "i", "command": ["train"], **(container or {})}
    pod = {"spec": {"containers": [node, {"name": "side", "image": "s"}], **copy.deepcopy(spec)}}
    prepare(pod, node, entry or Entry(), SETTINGS, identity, waits=waits)
    assert is_prepared(node)
    return pod["spec"]


def node(*args: Any, **kwargs: Any) -> dict[str, Any]:
    found: dict[str, Any] = prepared(*args, **kwargs)["containers"][0]
    return found


def test_the_command_is_inits_and_the_arguments_stay() -> None:
    found = node({"args": ["$(RANK)"]})
    assert (found["command"], found["args"]) == ([*RUN, "--", "train"], ["$(RANK)"])


def test_a_placeholder_waits() -> None:
    assert node(waits=True)["command"][:2] == [INIT, "wait"]


@pytest.mark.parametrize(("given", "grace"), [({}, "30"), ({"terminationGracePeriodSeconds": 600}, "600")])
def test_init_holds_the_grace_period_of_the_pod(given: dict[str, int], grace: str) -> None:
    assert node(**given)["command"][5] == grace


ENTRY = Entry(("/entry", "$(X)"), ("cmd",))


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"command": None}, ["/entry", "$$(X)", "cmd"]),  # kubelet does not replace $(X) in an image's command
        ({"command": None, "args": ["a"]}, ["/entry", "$$(X)"]),
        ({"command": ["c", "$(X)"]}, ["c", "$(X)"]),
    ],
)
def test_without_a_command_the_images_is_run(container: dict[str, Any], words: list[str]) -> None:
    assert node(container, entry=ENTRY)["command"] == [*RUN, "--", *words]


def test_pre_stop_is_ours() -> None:
    stop = {"host": "127.0.0.1", "port": 9480, "path": "/prestop/id1", "scheme": "HTTP"}
    assert node()["lifecycle"] == {"preStop": {"httpGet": stop}}


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ({"exec": {"command": ["sh", "-c", "echo $(date)"]}}, ["sh", "-c", "echo $$(date)"]),
        ({"sleep": {"seconds": 5}}, [INIT, "sleep", "5"]),
        ({"httpGet": {"port": 80, "path": "/quit"}}, [INIT, "check", "http", "80", "/quit"]),
    ],
)
def test_a_pre_stop_of_the_users_is_run_by_init(hook: dict[str, Any], words: list[str]) -> None:
    post_start = {"exec": {"command": ["warm-up"]}}
    found = node({"lifecycle": {"preStop": hook, "postStart": post_start}})
    assert found["command"] == [*RUN, "--pre-stop", str(len(words)), *words, "--", "train"]
    assert found["lifecycle"]["preStop"]["httpGet"]["path"] == "/prestop/id1"
    assert found["lifecycle"]["postStart"]["exec"]["command"] == [INIT, "probe", "/stasis", "--", "warm-up"]


def test_a_pre_stop_that_asks_another_host_cannot_be_kept() -> None:
    with pytest.raises(UsageError, match="preStop asks another host"):
        prepared({"lifecycle": {"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}}})


def test_where_pod_security_forbids_ours_the_users_hooks_stay() -> None:
    hooks = {"preStop": {"httpGet": {"port": 80}}, "postStart": {"exec": {"command": ["warm-up"]}}}
    found = node({"lifecycle": hooks}, identity="")
    assert found["command"] == [*RUN, "--", "train"]
    assert found["lifecycle"]["preStop"] == hooks["preStop"]
    assert found["lifecycle"]["postStart"]["exec"]["command"][:2] == [INIT, "probe"]


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({"exec": {"command": ["cat", "$(X)"]}}, ["cat", "$(X)"]),
        ({"httpGet": {"port": "web", "path": "/ok"}}, [INIT, "check", "http", "8080", "/ok"]),
        (
            {"httpGet": {"port": 1, "scheme": "HTTP", "httpHeaders": [{"name": "A", "value": "b"}]}},
            [INIT, "check", "http", "1", "/", "A: b"],
        ),
        ({"httpGet": {"port": 443, "scheme": "HTTPS", "path": "/ok"}}, [INIT, "check", "tcp", "443"]),
        ({"tcpSocket": {"port": 29500}}, [INIT, "check", "tcp", "29500"]),
        ({"grpc": {"port": 9, "service": "s"}}, [INIT, "check", "grpc", "9", "s"]),
    ],
)
@pytest.mark.parametrize("probe", ["livenessProbe", "readinessProbe", "startupProbe"])
def test_a_probe_holds_while_the_container_cannot_answer(probe: str, check: dict[str, Any], words: list[str]) -> None:
    ports = [{"name": "web", "containerPort": 8080}]
    found = node({"ports": ports, probe: {**check, "periodSeconds": 7, "timeoutSeconds": 2}})[probe]
    assert found == {
        "exec": {"command": [INIT, "probe", "/stasis", "--", *words]},
        "periodSeconds": 7,
        "timeoutSeconds": 2,
    }


@pytest.mark.parametrize("check", [{"httpGet": {"host": "db.example", "port": 1}}, {"tcpSocket": {"port": "no-such"}}])
def test_a_probe_that_does_not_ask_the_container_stays(check: dict[str, Any]) -> None:
    assert node({"livenessProbe": check})["livenessProbe"] == check


def test_other_containers_init_containers_and_sidecars_stay() -> None:
    first = [{"name": "fetch", "image": "f"}, {"name": "mesh", "image": "m", "restartPolicy": "Always"}]
    spec = prepared(initContainers=first, volumes=[{"name": "data", "emptyDir": {}}])
    assert spec["initContainers"][:2] == first
    assert spec["initContainers"][2]["name"] == "stasis-init"
    assert spec["containers"][1] == {"name": "side", "image": "s"}
    assert spec["volumes"] == [{"name": "data", "emptyDir": {}}, {"name": "stasis", "emptyDir": {}}]


@pytest.mark.parametrize(
    ("own", "pod", "profile"),
    [
        ({}, {}, {"type": "RuntimeDefault"}),
        ({"runAsUser": 7}, {}, {"type": "RuntimeDefault"}),
        ({"seccompProfile": {"type": "Unconfined"}}, {}, {"type": "Unconfined"}),
        ({}, {"seccompProfile": {"type": "Localhost"}}, None),
        ({"privileged": True}, {}, None),
    ],
)
def test_the_runtimes_profile_where_the_pod_sets_none(own: Any, pod: Any, profile: Any) -> None:
    found = node({"securityContext": own}, securityContext=pod)
    assert found["securityContext"].get("seccompProfile") == profile
    assert found["securityContext"].items() >= own.items()


@pytest.mark.parametrize(
    ("own", "pod", "user"), [({}, {}, 65532), ({"runAsUser": 7}, {"runAsUser": 8}, 7), ({}, {"runAsUser": 0}, 65532)]
)
def test_what_brings_init_fits_into_a_restricted_namespace(own: Any, pod: Any, user: int) -> None:
    context = prepared({"securityContext": own}, securityContext=pod)["initContainers"][0]["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize("resources", [None, {"limits": {"cpu": 1, "memory": "1Gi"}}])
def test_the_pods_quality_of_service_stays(resources: Any) -> None:
    installer = prepared({"resources": resources} if resources else {})["initContainers"][0]
    assert ("resources" in installer) == bool(resources)
    if resources:
        assert installer["resources"]["limits"] == installer["resources"]["requests"]


@pytest.mark.parametrize(
    ("container", "spec"),
    [
        ({}, {"volumes": [{"name": "stasis", "emptyDir": {}}]}),
        ({"volumeMounts": [{"name": "x", "mountPath": "/stasis/data"}]}, {}),
        ({"volumeMounts": [{"name": "x", "mountPath": "/stasis/"}]}, {}),
        ({}, {"initContainers": [{"name": "stasis-init", "image": "mine"}]}),
    ],
)
def test_a_name_of_ours_that_is_taken_is_told(container: Any, spec: Any) -> None:
    with pytest.raises(UsageError, match="of its own"):
        prepared(container, **spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostPID": True}, "hostPID"),
        ({"hostIPC": True}, "hostIPC"),
        ({"shareProcessNamespace": True}, "shareProcessNamespace"),
        ({"hostUsers": False}, "hostUsers: false"),
        ({"runtimeClassName": "gvisor"}, "sandbox"),
        ({"runtimeClassName": "kata-qemu"}, "sandbox"),
        ({"os": {"name": "windows"}}, "Windows"),
        ({"nodeSelector": {"kubernetes.io/os": "windows"}}, "Windows"),
    ],
)
def test_what_cannot_be_checkpointed_is_named(spec: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        refuse(spec)


def test_ordinary_pods_are_not_refused() -> None:
    refuse({"hostUsers": True, "hostNetwork": False, "runtimeClassName": "nvidia", "os": {"name": "linux"}})
