"""The CustomResourceDefinitions are those that the types say."""

from __future__ import annotations

from pathlib import Path

import pytest

from stasis.api.generate import files, structural
from stasis.api.v1alpha1 import CheckpointPolicySpec
from stasis.api.v1alpha1.checkpointpolicy import quantity

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(files()))
def test_what_is_committed_is_what_the_types_say(path: str) -> None:
    assert (REPO / path).read_text() == files()[path], "run `make crds`"


def test_a_schema_becomes_structural() -> None:
    schema = {
        "title": "A",
        "properties": {
            "b": {"$ref": "#/$defs/B", "description": "a  b\nis it", "default": {"c": 1, "d": None}},
            "e": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None},
            "f": {"const": "F", "type": "string"},
        },
        "additionalProperties": False,
    }
    b = {"type": "object", "properties": {"c": {"type": "integer", "default": 1, "title": "C"}}}
    assert structural(schema, {"B": b}) == {
        "properties": {
            "b": {
                "description": "a b is it",
                "type": "object",
                "default": {},
                "properties": {"c": {"type": "integer", "default": 1}},
            },
            "e": {"type": "string", "maxLength": 3},
            "f": {"type": "string", "enum": ["F"]},
        }
    }


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("2Ki", 2048), ("3k", 3000), ("500Gi", 500 << 30), ("1P", 10**15)]
)
def test_a_quantity_is_a_number_of_bytes(text: str, count: int) -> None:
    assert quantity(text) == count


def test_the_built_in_policy_is_all_the_defaults() -> None:
    policy = CheckpointPolicySpec()
    assert (policy.container, policy.durability, policy.timeout_seconds, policy.on_failure) == (
        "node",
        "Remote",
        900,
        "KeepRunning",
    )
    assert policy.retention.max_bytes_int is None
