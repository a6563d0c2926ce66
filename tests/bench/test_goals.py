"""What the benchmark makes of its samples."""

from __future__ import annotations

import pytest
from bench.goals import GOALS, NAMES, judge, quantile, worst
from bench.measure import ToolFailed, tools
from bench.throttle import Bucket

BY_NAME = {goal.name: goal for goal in GOALS}


def test_a_ratio_is_one_of_medians_with_the_spread_of_the_pairs() -> None:
    found = judge(BY_NAME["P6"], {"local.captured": [1.0, 4.0, 2.0], "tmpfs.dump": [10.0, 8.0, 10.0]})
    assert found == {"median": 0.2, "spread": [0.1, 0.5], "target": 0.4, "reached": True, "runs": 3}


def test_a_figure_above_its_target_is_not_reached() -> None:
    assert not judge(BY_NAME["P6"], {"local.captured": [5.0], "tmpfs.dump": [10.0]})["reached"]


def test_the_gap_is_the_95th_of_100_less_the_usual_median() -> None:
    gaps = [float(n) for n in range(100, 0, -1)]
    found = judge(BY_NAME["P13"], {"gap.worse": gaps, "gap.usual": [7.0, 8.0, 50.0]})
    assert (found["median"], found["spread"]) == (87.0, [-7.0, 92.0])
    assert quantile([float(n) for n in range(20)], 0.95) == 18.0


def test_of_several_sizes_the_worst_counts() -> None:
    one, four = ({"median": m, "spread": [m, m], "target": 1.0, "reached": True, "runs": 1} for m in (0.5, 0.7))
    found = worst({"1": one, "4": four})
    assert (found["median"], found["size"]) == (0.7, "4")
    assert found["sizes"] == {"1": one, "4": four}


def test_every_goal_has_a_name_of_its_own() -> None:
    assert list(NAMES) == [f"P{n}" for n in range(1, 14)]


def test_a_bucket_lets_through_its_rate_and_no_more() -> None:
    bucket, now, sent = Bucket(1000.0), 0.0, 0
    while sent < 10_000:
        sent += 64
        now += bucket.wait(now, 64)
    assert now == pytest.approx((sent - 100) / 1000.0)  # a tenth of a second's is there at the start


def test_a_tool_that_fails_is_an_error_also_in_mid_pipeline() -> None:
    assert tools(["printf", "abc"], ["cat"]).wall > 0
    with pytest.raises(ToolFailed, match="no-such-file"):
        tools(["cat", "/no-such-file"], ["cat"])
