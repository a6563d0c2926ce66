"""A restore into a container that is another than the dumped one is refused, with both values."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from stasis.controllers.fixed import changed, fixed_of, image

DIGEST = "sha256:" + "a" * 64
POD: dict[str, Any] = {
    "metadata": {
        "name": "gpt-0",
        "labels": {"batch.kubernetes.io/job-completion-index": "0", "jobset.sigs.k8s.io/replicatedjob-name": "node"},
        "annotations": {"stasis.dev/container": "node"},
    },
    "spec": {
        "containers": [
            {
                "name": "node",
                "command": ["/stasis/b1/init", "run", "--volume", "/stasis", "--", "torchrun"],
                "args": ["/code/train.py"],
                "env": [{"name": "PET_NNODES", "value": "2"}, {"name": "TOKEN", "value": "s3cret"}],
                "volumeMounts": [
                    {"name": "code", "mountPath": "/code"},
                    {"name": "stasis", "mountPath": "/stasis"},
                    {"name": "kube-api-access-x1", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"},
                ],
            }
        ],
        "volumes": [
            {"name": "code", "configMap": {"name": "gpt"}},
            {"name": "stasis", "emptyDir": {}},
            {"name": "kube-api-access-x1", "projected": {}},
        ],
    },
    "status": {"containerStatuses": [{"name": "node", "image": "trainer:1", "imageID": f"r.io/trainer@{DIGEST}"}]},
}
SAVED = {"fixed": fixed_of([POD]), "ranks": [{"rank": 0, "image": image(POD)}]}


def other(**container: Any) -> dict[str, Any]:
    pod = deepcopy(POD)
    pod["spec"]["containers"][0] |= container
    return pod


def with_image(reference: str) -> dict[str, Any]:
    pod = deepcopy(POD)
    pod["status"]["containerStatuses"][0]["imageID"] = reference
    return pod


def test_a_placeholder_of_the_same_template_is_the_same() -> None:
    waiting = other(command=["/stasis/b2/init", "wait", "--volume", "/stasis", "--grace", "30", "--", "torchrun"])
    waiting["spec"]["volumes"][2]["name"] = waiting["spec"]["containers"][0]["volumeMounts"][2]["name"] = "random"
    assert changed(SAVED, [waiting], copy=False) == ""


@pytest.mark.parametrize("reference", [f"mirror.io/trainer@{DIGEST}", "sha256:" + "c" * 64, ""])
def test_an_image_is_its_digest_where_that_can_be_compared(reference: str) -> None:
    assert changed(SAVED, [with_image(reference)], copy=False) == ""


def test_a_tag_that_has_moved_is_refused_with_both_digests() -> None:
    moved = "r.io/trainer@sha256:" + "b" * 64
    told = changed(SAVED, [with_image(moved)], copy=False)
    assert DIGEST in told
    assert moved in told


def test_an_edited_command_is_refused_with_both_values() -> None:
    told = changed(SAVED, [other(args=["/code/eval.py"])], copy=False)
    assert told == 'command was ["torchrun", "/code/train.py"], is ["torchrun", "/code/eval.py"]'


def test_values_of_variables_are_not_told() -> None:
    env = [{"name": "PET_NNODES", "value": "2"}, {"name": "TOKEN", "value": "0ther"}]
    assert changed(SAVED, [other(env=env)], copy=False) == "other values of env TOKEN"
    assert "s3cret" not in str(SAVED)
    assert changed(SAVED, [other(env=env)], copy=True) == ""  # a fork's variables name the fork


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mounts", {"volumeMounts": []}),
        ("user", {"securityContext": {"runAsUser": 1000}}),
        ("workingDir", {"workingDir": "/data"}),
    ],
)
def test_what_else_is_fixed(name: str, more: dict[str, Any]) -> None:
    assert changed(SAVED, [other(**more)], copy=False).startswith(f"{name} was ")


def test_what_may_be_another() -> None:
    assert changed(SAVED, [other(resources={"limits": {"memory": "8Gi"}})], copy=False) == ""
    assert changed({"ranks": [{"rank": 0}]}, [with_image("x@sha256:1")], copy=False) == ""  # an import


def test_each_trainer_of_a_gang_is_compared_with_itself() -> None:
    launcher = other(command=["mpirun"])
    launcher["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] = "launcher"
    saved = {"fixed": fixed_of([launcher, POD, POD])}
    assert changed(saved, [launcher, POD], copy=False) == ""
    launcher["spec"]["containers"][0]["command"] = ["orterun"]
    assert changed(saved, [launcher, POD], copy=False).startswith('command was ["mpirun"')
