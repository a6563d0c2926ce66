"""What an operation's description says, seen from the checkpoint that it is about."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicySpec
from stasis.controllers.description import Description, describe, timing
from stasis.core.plan import Kind, Spec


def pod(rank: int) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": f"gpt-{rank}", "uid": f"p{rank}", "labels": {names.COMPLETION_INDEX: rank}}
    return {
        "metadata": metadata,
        "spec": {"nodeName": f"worker-{rank}", "containers": [{"name": "node"}]},
        "status": {"podIP": f"10.0.0.{rank}", "containerStatuses": []},
    }


def checkpoint(op: str) -> dict[str, Any]:
    spec = Spec(op=op, serial=1, kind=Kind.RELEASE, ranks=(0, 1))
    made = {"op": op, "kind": "release", "serial": 1, "spec": json.dumps(spec.to_dict())}
    return {"metadata": {"uid": "mine"}, "status": {"operations": [made]}}


def test_a_restore_is_from_the_operation_that_made_the_checkpoint_whatever_object_tells_of_it() -> None:
    found = describe(
        checkpoint("the-original"),
        Kind.RESTORE,
        3,
        [pod(0), pod(1)],
        world_size=2,
        repository="r",
        policy=CheckpointPolicySpec(),
        known={},
        manifests={0: "a", 1: "b"},
    )
    assert found.spec.op == "mine-r3"
    assert found.spec.checkpoint == "the-original"
    assert found.spec.requires == ("the-original",)
    assert found.args["*"]["uid"] == "the-original"


def test_an_imported_checkpoint_has_ranks_without_pods_here() -> None:
    text = checkpoint("x")["status"]["operations"][0]["spec"]
    assert Description.from_json(text).pods == {0: "", 1: ""}


@pytest.mark.parametrize("seconds", [10, 30, 900])
def test_a_checkpoint_can_begin_under_any_timeout_that_a_policy_may_have(seconds: int) -> None:
    policy = CheckpointPolicySpec(timeout_seconds=seconds)
    Spec(op="made", serial=1, kind=Kind.RELEASE, ranks=(0, 1), timing=timing(policy))
