"""A rank's config survives JSON, and what is no config is refused before it is used."""

import json
from typing import Any

import pytest

from stasis.core.rankconfig import RankConfig
from stasis.errors import Corrupt, Unsupported

CONFIG = RankConfig(
    uid="u1",
    rank=0,
    world_size=2,
    root=7,
    threads=3,
    last_pid=12,
    hostname="gpt-0",
    init="/stasis/init-1-abc/init",
    addresses={"0": ["10.77.1.2"], "1": ["10.77.1.3", "10.77.1.9"]},
    stdio={"pipe:[12]": 1},
    areas={"upper": 10},
    stopped=(9,),
    attributes=({"pid": 7, "nice": 1},),
    timings={"freeze": 0.1},
)


def data(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(CONFIG.to_dict())) | changes


def test_it_survives_json() -> None:
    assert RankConfig.from_dict(data()) == CONFIG


def test_a_later_field_is_ignored() -> None:
    assert RankConfig.from_dict(data(new_field=1)) == CONFIG


@pytest.mark.parametrize(
    "change",
    [
        {"root": "7"},
        {"root": -1},
        {"rank": True},
        {"stopped": {"a": 1}},
        {"stopped": ["9"]},
        {"addresses": ["10.0.0.1"]},
        {"stdio": {"pipe:[1]": "1"}},
        {"attributes": [1]},
        {"hostname": "x" * 5000},
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match=next(iter(change))):
        RankConfig.from_dict(data(**change))


def test_a_missing_field_is_refused() -> None:
    broken = data()
    del broken["root"]
    with pytest.raises(Corrupt, match="root"):
        RankConfig.from_dict(broken)


def test_another_version_is_refused() -> None:
    with pytest.raises(Unsupported, match="version 2"):
        RankConfig.from_dict(data(version=2))


def test_a_connection_that_is_none_is_refused() -> None:
    with pytest.raises(Corrupt, match="connection"):
        RankConfig.from_dict(data(connections=[{"ends": 1}])).table()
