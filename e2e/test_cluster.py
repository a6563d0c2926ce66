"""The cluster itself, before Stasis is in it: nodes, addresses, names, the registry, and a TrainJob that trains."""

from __future__ import annotations

import ipaddress
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.lab import Cluster

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parent / "cluster"
SPREAD = ["stasis-e2e-worker", "stasis-e2e-worker2"]
Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def image(bare_cluster: Cluster) -> str:
    return f"{bare_cluster.registry}/stasis-trainer:e2e"


@pytest.fixture(scope="module")
def space(bare_cluster: Cluster) -> Iterator[str]:
    bare_cluster.kubectl("create", "namespace", "cluster-test")
    yield "cluster-test"
    bare_cluster.kubectl("delete", "namespace", "cluster-test")


@pytest.fixture
def start(bare_cluster: Cluster, space: str, image: str) -> Iterator[Start]:
    """Starts a pod that sleeps on a node, and waits until it runs."""
    names: list[str] = []

    def start(name: str, node: str, annotations: dict[str, str] | None = None) -> dict[str, Any]:
        container = {"name": "main", "image": image, "command": ["sleep", "1000"]}
        bare_cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": space, "annotations": annotations or {}},
                "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]},
            }
        )
        names.append(name)
        bare_cluster.kubectl("-n", space, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")
        pod: dict[str, Any] = bare_cluster.get("-n", space, "pod", name)
        return pod

    yield start
    if names:
        bare_cluster.kubectl("-n", space, "delete", "pod", *names, "--now", "--ignore-not-found")


def test_three_nodes_are_ready(bare_cluster: Cluster) -> None:
    ready = {
        node["metadata"]["name"]: condition["status"]
        for node in bare_cluster.items("nodes")
        for condition in node["status"]["conditions"]
        if condition["type"] == "Ready"
    }
    assert ready == dict.fromkeys(["stasis-e2e-control-plane", *SPREAD], "True")


def test_the_registry_answers_the_host_and_pods_at_one_address(bare_cluster: Cluster, space: str, start: Start) -> None:
    url = f"http://{bare_cluster.registry}/v2/stasis-trainer/tags/list"
    start("client", SPREAD[0])
    read = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=5).read().decode())"
    answers = [
        json.loads(urllib.request.urlopen(url, timeout=5).read()),
        json.loads(bare_cluster.kubectl("-n", space, "exec", "client", "--", "python3", "-c", read)),
    ]
    assert answers == [{"name": "stasis-trainer", "tags": ["e2e"]}] * 2


def test_a_pod_gets_the_address_that_its_annotation_wants_on_another_node(
    bare_cluster: Cluster, space: str, start: Start
) -> None:
    wish = {"stasis.dev/pod-ip": ""}
    first = start("first", SPREAD[0], wish)["status"]["podIP"]
    bare_cluster.kubectl("-n", space, "delete", "pod", "first", "--now")
    moved = start("moved", SPREAD[1], {"stasis.dev/pod-ip": first})
    assert moved["status"]["podIP"] == first
    # Those who stayed reach it there, and nobody else gets it at home.
    peer = start("peer", SPREAD[0])
    assert peer["status"]["podIP"] != first
    bare_cluster.kubectl("-n", space, "exec", "peer", "--", "python3", "-c", _CONNECT, first)


def test_a_pod_without_a_wish_gets_an_address_of_its_node(bare_cluster: Cluster, start: Start) -> None:
    for number, node in enumerate(SPREAD):
        own = ipaddress.ip_network(bare_cluster.get("node", node)["spec"]["podCIDR"])
        assert ipaddress.ip_address(start(f"plain-{number}", node)["status"]["podIP"]) in own


def test_a_wish_for_an_address_in_use_does_not_keep_a_pod_from_starting(start: Start) -> None:
    taken = start("holder", SPREAD[0])["status"]["podIP"]
    assert start("late", SPREAD[1], {"stasis.dev/pod-ip": taken})["status"]["podIP"] != taken


def test_a_trainjob_of_two_pods_trains_to_its_end(bare_cluster: Cluster, space: str) -> None:
    """torchrun finds its peers by the names that JobSet gives them, so names work too."""
    trainer = {"numNodes": 2, "numProcPerNode": 1, "command": ["torchrun", "/code/train.py", "--steps=3"]}
    script = (Path(__file__).parents[1] / "operator/src/stasis/demo/train.py").read_text()
    meta = {"name": "smoke", "namespace": space}
    code = {"name": "code", "configMap": {"name": "smoke"}}
    mount = {"name": "node", "volumeMounts": [{"name": "code", "mountPath": "/code"}]}
    template = {"spec": {"volumes": [code], "containers": [mount]}}
    patch = {
        "manager": "tests.stasis.dev/e2e",
        "trainingRuntimeSpec": {
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": template}}}]}}
        },
    }
    bare_cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"train.py": script}},
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": meta,
            "spec": {"runtimeRef": {"name": "torch-e2e"}, "trainer": trainer, "runtimePatches": [patch]},
        },
    )
    bare_cluster.kubectl("-n", space, "wait", "--for=condition=Complete", "trainjob/smoke", "--timeout=180s")
    pods = bare_cluster.items("-n", space, "pods", "-l", "jobset.sigs.k8s.io/jobset-name=smoke")
    assert sorted(pod["spec"]["nodeName"] for pod in pods) == SPREAD
    for pod in pods:
        log = bare_cluster.kubectl("-n", space, "logs", pod["metadata"]["name"])
        assert sum(line.startswith("step ") for line in log.splitlines()) == 3


def test_a_node_gives_nobody_an_address_that_a_pod_has_elsewhere(start: Start) -> None:
    first = ipaddress.ip_address(start("before", SPREAD[0])["status"]["podIP"])
    next_one = str(first + 1)
    assert start("guest", SPREAD[1], {"stasis.dev/pod-ip": next_one})["status"]["podIP"] == next_one
    assert start("after", SPREAD[0])["status"]["podIP"] != next_one


# A closed port answers too, by a reset: only an address that is not there gives another error.
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 1), timeout=5)
except ConnectionRefusedError:
    pass
"""
