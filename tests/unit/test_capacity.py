"""The way to capture is chosen by what is free; a refusal names both what is needed and what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stasis.core.capacity import MIB, Amounts, ContainerRoom, Mode, plan, require_container
from stasis.errors import ResourceShort

GIB = 1 << 30
LARGE = Amounts(memory=64 * GIB, disk=64 * GIB, descriptors=1 << 20, pipe_pages=1 << 30)


def room(**changes: int) -> Amounts:
    return Amounts(**{**LARGE.as_dict(), **changes})


@pytest.mark.parametrize(
    ("releases", "free", "mode"),
    [
        (True, LARGE, Mode.HOLD),
        (False, LARGE, Mode.COPY),  # what goes on running must not be held by reference
        (True, room(memory=0, disk=0), Mode.HOLD),
        (True, room(descriptors=1000), Mode.COPY),
        (True, room(pipe_pages=16384), Mode.COPY),
        (True, room(pipe_pages=16384, memory=GIB), Mode.SPILL),
        (False, room(memory=GIB), Mode.SPILL),
    ],
)
def test_the_mode_follows_what_is_free(releases: bool, free: Amounts, mode: Mode) -> None:
    assert plan(2 * GIB, free, releases=releases).mode == mode


def test_hold_takes_one_pipe_for_each_mib() -> None:
    assert plan(10 * MIB + 1, LARGE, releases=True).amounts == Amounts(descriptors=11, pipe_pages=11 * 256)


def test_what_is_kept_counts_in_every_mode() -> None:
    kept = Amounts(memory=MIB, disk=3 * GIB)
    assert plan(GIB, LARGE, releases=False, kept=kept).amounts == Amounts(memory=GIB + MIB, disk=3 * GIB)
    with pytest.raises(ResourceShort, match="and 3072 MiB of packs"):
        plan(GIB, room(disk=2 * GIB), releases=True, kept=kept)


def test_too_little_is_said_with_numbers() -> None:
    with pytest.raises(ResourceShort, match="2048 MiB to capture find no room: 1024 MiB of memory and 512 MiB of disk"):
        plan(2 * GIB, room(memory=GIB, disk=GIB // 2), releases=False)


amounts = st.builds(Amounts, *[st.integers(0, 1 << 40)] * 4)


@given(st.integers(0, 1 << 38), amounts, amounts, st.booleans())
def test_a_plan_always_fits_and_more_room_is_never_worse(
    size: int, free: Amounts, more: Amounts, releases: bool
) -> None:
    order = list(Mode)
    try:
        made = plan(size, free, releases=releases)
    except ResourceShort:
        return
    assert made.amounts.fits(free)
    assert order.index(plan(size, free + more, releases=releases).mode) <= order.index(made.mode)


def test_a_container_without_limits_takes_all() -> None:
    require_container(ContainerRoom(None, None, {}), memory=1 << 50, threads=1 << 20, huge_pages={})


def test_a_container_that_is_too_small_is_refused_with_both_values() -> None:
    small = ContainerRoom(memory=GIB, threads=10, huge_pages={2 * MIB: 3})
    require_container(small, memory=GIB, threads=10, huge_pages={2 * MIB: 3})
    with pytest.raises(ResourceShort) as refused:
        require_container(small, memory=GIB + 1, threads=11, huge_pages={2 * MIB: 4, GIB: 1})
    for text in (
        "memory limit leaves 1024 MiB, the checkpoint holds 1025 MiB",
        "limit of pids leaves 10, the checkpoint holds 11 threads",
        "3 huge pages of 2 MiB are free, the checkpoint holds 4",
        "0 huge pages of 1024 MiB are free, the checkpoint holds 1",
    ):
        assert text in str(refused.value)


def test_a_node_without_the_memory_is_named() -> None:
    crowded = ContainerRoom(None, None, {}, available=3 * GIB)
    require_container(crowded, memory=3 * GIB, threads=1, huge_pages={})
    with pytest.raises(ResourceShort, match="node has 3072 MiB of memory to give, the checkpoint holds 4096 MiB"):
        require_container(crowded, memory=4 * GIB, threads=1, huge_pages={})
