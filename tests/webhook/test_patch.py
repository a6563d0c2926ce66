"""JSON patches, applied by another implementation of RFC 6902."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stasis.webhook.patch import diff

LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
KEYS = st.text("ab~/0 1", max_size=4)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=5)


@given(OBJECTS, OBJECTS)
def test_a_patch_makes_the_one_of_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    given = copy.deepcopy(before)
    made = jsonpatch.apply_patch(copy.deepcopy(before), diff(before, after))
    assert (made, before) == (after, given)


@given(OBJECTS)
def test_equal_objects_need_none(same: dict[str, Any]) -> None:
    assert diff(same, copy.deepcopy(same)) == []


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"a": [1]}, {"a": [1, 2]}, [{"op": "add", "path": "/a/-", "value": 2}]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, [{"op": "replace", "path": "/a/0/b", "value": 2}]),
        ({}, {"s/t~u": ""}, [{"op": "add", "path": "/s~1t~0u", "value": ""}]),
        ({"a": [1]}, {"a": []}, [{"op": "replace", "path": "/a", "value": []}]),
        ({"a": True}, {"a": 1}, [{"op": "replace", "path": "/a", "value": 1}]),
    ],
)
def test_a_patch_is_small(before: Any, after: Any, patch: Any) -> None:
    assert diff(before, after) == patch
