"""A case's world as a pod has it."""

from __future__ import annotations

from typing import Any

import pytest

from stasis.cases.manifest import inexpressible, job
from stasis.cases.spec import World


def container(world: World, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's spec, and the trainer's."""
    runtime, _ = job("one", "k_one.py", world, "image:1", **{"pace": 4, "outside": "", "pvc": False} | options)
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = node["template"]["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def test_what_no_pod_can_be_given_is_named() -> None:
    assert inexpressible(World()) == ""
    for world in (
        World(cgroup_rw=True),
        World(memlock=1 << 20),
        World(hugepages=2),
        World(hostname2="other"),
        World(shm2="64m"),
    ):
        assert inexpressible(world)


@pytest.mark.parametrize(
    ("world", "context"),
    [
        (World(uid=1000, caps="none", seccomp=True), {"runAsUser": 1000, "allowPrivilegeEscalation": False}),
        (World(uid=1000, caps="none", seccomp=True), {"seccompProfile": {"type": "RuntimeDefault"}}),
        (World(), {"runAsUser": 0, "seccompProfile": {"type": "Unconfined"}}),
        (World(caps="none"), {"capabilities": {"drop": ["ALL"]}}),
    ],
)
def test_a_user_and_what_it_may_do(world: World, context: dict[str, Any]) -> None:
    found = container(world)[1]["securityContext"]
    assert found | context == found


def test_capabilities_beyond_a_runtimes_are_added() -> None:
    added = container(World(caps="all"))[1]["securityContext"]["capabilities"]["add"]
    assert "BPF" in added
    assert "CHOWN" not in added


def test_a_pods_dev_shm_has_the_size_that_is_asked_for() -> None:
    pod, _ = container(World(shm="64m"))
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}} in pod["volumes"]


def test_a_log_in_a_file_is_said_by_a_sidecar() -> None:
    pod, _ = container(World(log="shm/run/out.log"))
    (reader,) = pod["initContainers"]
    assert reader["restartPolicy"] == "Always"
    assert reader["command"][-1] == "/dev/shm/run/out.log"


def test_a_new_address_is_asked_for_by_a_policy() -> None:
    _, trainjob = job("one", "k_one.py", World(ip2=True, args=("a",)), "image:1", pace=4, outside="10.0.0.9", pvc=True)
    assert trainjob["metadata"]["labels"] == {"stasis.dev/policy": "translate"}
    assert trainjob["spec"]["trainer"]["command"] == ["python3", "/case/k_one.py", "a"]
