"""What the API server says about wrong objects of ours, and what `kubectl get` shows of right ones."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from lightkube import ApiError, Client
from lightkube.types import PatchType
from tests.kube.objects import checkpoint, policy
from tests.support.apiserver import ApiServer, program

from stasis.api.v1alpha1 import CheckpointPolicy, CheckpointPolicySpec, TrainJobCheckpoint
from stasis.api.v1alpha1.trainjobcheckpoint import ConditionType
from stasis.kube.client import Checkpoints, Policies

pytestmark = pytest.mark.kube

WRONG_POLICIES = [
    ({"durability": "remote"}, 'spec.durability: Unsupported value: "remote": supported values: "Remote", "Local"'),
    ({"onFailure": "Ignore"}, 'supported values: "KeepRunning", "Suspend"'),
    (
        {"timeoutSeconds": 5},
        "spec.timeoutSeconds: Invalid value: 5: spec.timeoutSeconds in body should be greater than",
    ),
    ({"retention": {"keep": 0}}, "spec.retention.keep"),
    ({"retention": {"maxBytes": "many"}}, "write a whole number of bytes with or without a unit, such as 500Gi"),
    ({"storage": {"repository": "reg.example/a:tag"}}, "write HOST[:PORT]/NAME without a tag or digest"),
    ({"storage": {"repository": "https://reg.example/a"}}, "write HOST[:PORT]/NAME without a tag or digest"),
    ({"container": "No_Such"}, "spec.container"),
    ({"timeoutSeconds": "15m"}, 'spec.timeoutSeconds: Invalid value: "string"'),
    ({"durabilty": "Local"}, 'unknown field "spec.durabilty"'),
]


Kubectl = Callable[..., subprocess.CompletedProcess[str]]
DIGEST = "sha256:" + 64 * "a"


@pytest.fixture(scope="module")
def kubectl(api: ApiServer) -> Kubectl:
    binary = program("kubernetes") / "bin/kubectl"

    def run(*args: str, given: object = None) -> subprocess.CompletedProcess[str]:
        command = [str(binary), f"--kubeconfig={api.kubeconfig}", f"--cache-dir={api.folder}/kubectl", *args]
        return subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)

    return run


@pytest.mark.parametrize(("spec", "words"), WRONG_POLICIES, ids=lambda part: str(part)[:40])
def test_a_wrong_field_of_a_policy_is_refused_with_words_that_help(
    kubectl: Kubectl, namespace: str, spec: dict[str, Any], words: str
) -> None:
    wrong = {"apiVersion": "stasis.dev/v1alpha1", "kind": "CheckpointPolicy", "metadata": {"name": "p"}, "spec": spec}
    done = kubectl("create", "-n", namespace, "-f", "-", given=wrong)
    assert done.returncode == 1
    assert words in done.stderr


def test_a_policy_gets_the_defaults_that_the_built_in_one_has(client: Client, namespace: str) -> None:
    client.create(Policies(metadata={"name": "p", "namespace": namespace}))
    assert CheckpointPolicy.from_dict(dict(client.get(Policies, "p", namespace=namespace))).spec == (
        CheckpointPolicySpec()
    )


def test_the_spec_of_a_checkpoint_cannot_be_changed(client: Client, namespace: str) -> None:
    client.create(checkpoint("c", namespace, kind="Checkpoint"))
    with pytest.raises(ApiError, match="the spec cannot be changed: make another TrainJobCheckpoint"):
        client.patch(Checkpoints, "c", {"spec": {"kind": "Suspend"}}, namespace=namespace, patch_type=PatchType.MERGE)


def test_a_checkpoint_names_the_uid_of_its_job(client: Client, namespace: str) -> None:
    wrong = checkpoint("c", namespace)
    del wrong["spec"]["trainJob"]["uid"]
    with pytest.raises(ApiError, match=r"spec.trainJob.uid: Required value"):
        client.create(wrong)


def record(text: str) -> dict[str, Any]:
    return {"key": "u/decision", "verdict": "commit", "epoch": 65537, "record": text}


def status(text: str = "{}", **more: Any) -> dict[str, Any]:
    operation = {"op": "u", "kind": "release", "serial": 1, "spec": "{}", "records": [record(text)]}
    return {"serial": 1, "operations": [operation], **more}


def put(client: Client, namespace: str, status: dict[str, Any]) -> Any:
    patch = {"status": status}
    return client.patch(
        Checkpoints.Status, "c", patch, namespace=namespace, patch_type=PatchType.MERGE, field_manager="test"
    )


def test_a_record_and_a_serial_are_written_once_also_for_a_writer_that_does_not_look(
    client: Client, namespace: str
) -> None:
    client.create(checkpoint("c", namespace))
    put(client, namespace, status())
    with pytest.raises(ApiError, match="a record is written once"):
        put(client, namespace, status("{1}"))
    with pytest.raises(ApiError, match="the serial is set once"):
        put(client, namespace, status() | {"serial": 2})
    put(client, namespace, status(message="what is not decided may change"))


def test_a_whole_status_comes_back_as_it_went(client: Client, namespace: str) -> None:
    at = "2026-11-30T20:00:00Z"
    rank = {"rank": 0, "pod": "p", "manifest": DIGEST, "addresses": ["10.0.0.1"], "seconds": {"freeze": "0.012"}}
    condition = {"type": "Complete", "status": "True", "reason": "Committed", "message": "", "lastTransitionTime": at}
    client.create(checkpoint("c", namespace))
    given = status(ranks=[rank], conditions=[condition], index=DIGEST, frozenSeconds="0.4", storedBytes=1 << 40)
    put(client, namespace, given)
    found = TrainJobCheckpoint.from_dict(dict(client.get(Checkpoints, "c", namespace=namespace)))
    assert found.status is not None
    assert found.condition(ConditionType.COMPLETE)
    again = found.status.to_dict()
    assert {key: again[key] for key in ("serial", "conditions", "index", "frozenSeconds", "storedBytes")} == {
        key: given[key] for key in ("serial", "conditions", "index", "frozenSeconds", "storedBytes")
    }
    assert again["ranks"][0].items() >= rank.items()
    put(client, namespace, again)


def test_get_tells_what_a_user_asks(client: Client, kubectl: Kubectl, namespace: str) -> None:
    at = "2026-11-30T20:00:00Z"
    client.create(checkpoint("gpt-1", namespace, kind="Suspend"))
    condition = {"type": "Complete", "status": "True", "reason": "Committed", "message": "", "lastTransitionTime": at}
    patch = {"status": {"conditions": [condition], "size": "1.2 GiB", "frozenSeconds": "0.4"}}
    client.patch(Checkpoints.Status, "gpt-1", patch, namespace=namespace, patch_type=PatchType.MERGE)
    lines = kubectl("get", "ckpt", "-n", namespace).stdout.splitlines()
    assert lines[0].split() == "NAME JOB KIND COMPLETE DURABLE RELEASED RESTORED SIZE FROZEN AGE".split()
    assert lines[1].split()[:5] == ["gpt-1", "gpt", "Suspend", "True", "1.2"]
    client.create(policy("default", namespace))
    everything = kubectl("get", "stasis", "-n", namespace, "-o", "name").stdout.split()
    assert everything == ["checkpointpolicy.stasis.dev/default", "trainjobcheckpoint.stasis.dev/gpt-1"]
    assert kubectl("get", "ckptpol", "default", "-n", namespace).stdout.splitlines()[1].split()[1:4] == [
        "node",
        "Remote",
        "KeepRunning",
    ]
