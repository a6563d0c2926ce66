"""Filters are compared by what they answer, so that another version of a profile is no refusal by itself."""

from __future__ import annotations

import struct

import pytest

from stasis.core.seccomp import DISABLED, FILTER, STRICT, confines

ALLOW, ERRNO, KILL, LOG, TRACE = 0x7FFF0000, 0x00050001, 0x80000000, 0x7FFC0000, 0x7FF00000
X86_64 = 0xC000003E
LOAD_NUMBER, LOAD_ARCH, LOAD_ARGUMENT = (0x20, 0, 0, 0), (0x20, 0, 0, 4), (0x20, 0, 0, 16)


def program(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<HBBI", *one) for one in instructions)


def denying(*numbers: int, action: int = ERRNO) -> bytes:
    tests = [(0x15, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    return program(LOAD_NUMBER, *tests, (6, 0, 0, ALLOW), (6, 0, 0, action))


def by_argument(number: int) -> bytes:
    """Denies a call when its first argument is 40 (AF_VSOCK)."""
    return program(
        LOAD_NUMBER, (0x15, 0, 3, number), LOAD_ARGUMENT, (0x15, 0, 1, 40), (6, 0, 0, ERRNO), (6, 0, 0, ALLOW)
    )


NOTHING = program((6, 0, 0, ALLOW))


@pytest.mark.parametrize(
    ("mine", "theirs", "confined"),
    [
        ([denying(425)], [denying(425)], True),
        ([denying(425, 426)], [denying(425)], True),
        ([denying(426, 425)], [denying(425, 426)], True),  # another order
        ([denying(425)], [denying(425, 426)], False),
        ([denying(425, action=KILL)], [denying(425)], True),
        ([denying(425)], [denying(425, action=KILL)], False),
        ([denying(425, action=LOG)], [denying(425)], False),
        ([denying(425, action=TRACE)], [denying(425, action=LOG)], True),
        ([denying(425), denying(426)], [denying(426, 425)], True),  # two programs, the strictest answer counts
        ([denying(425), NOTHING], [denying(425)], True),
        ([NOTHING], [NOTHING], True),
        ([NOTHING], [denying(425)], False),
        ([by_argument(41)], [by_argument(41)], True),
        ([by_argument(41), NOTHING], [NOTHING, by_argument(41)], True),
        ([denying(41)], [by_argument(41)], True),
        ([NOTHING, NOTHING], [by_argument(41)], False),
        ([by_argument(41)], [denying(41)], False),
        ([b"\x20\0\0\0\0\0\0\0"], [denying(425)], False),  # runs off its end: taken for one that allows all
        ([program((5, 0, 0, 0xFFFFFFFF))], [denying(425)], False),
        ([], [denying(425)], False),
    ],
)
def test_programs(mine: list[bytes], theirs: list[bytes], confined: bool) -> None:
    assert confines(FILTER, mine, FILTER, theirs) == confined


@pytest.mark.parametrize(
    ("mode", "needed", "confined"),
    [(DISABLED, DISABLED, True), (DISABLED, FILTER, False), (FILTER, STRICT, False), (STRICT, FILTER, True)],
)
def test_modes(mode: int, needed: int, confined: bool) -> None:
    assert confines(mode, [denying(1)] if mode == FILTER else [], needed, [denying(425)]) == confined


def test_a_program_that_tells_abis_apart() -> None:
    """Denies all but x86_64's own calls, as runtimes' profiles do; without the check the 32-bit calls are free."""
    checked = program(LOAD_ARCH, (0x15, 1, 0, X86_64), (6, 0, 0, KILL), LOAD_NUMBER, (0x45, 0, 1, 0x40000000),
                      (6, 0, 0, KILL), (6, 0, 0, ALLOW))  # fmt: skip
    unchecked = program(LOAD_NUMBER, (0x45, 0, 1, 0x40000000), (6, 0, 0, KILL), (6, 0, 0, ALLOW))
    assert confines(FILTER, [checked, NOTHING], FILTER, [NOTHING, checked])
    assert not confines(FILTER, [unchecked], FILTER, [checked])
    assert confines(FILTER, [checked], FILTER, [unchecked])


def test_arithmetic_and_memory_are_followed() -> None:
    """number & 0xFF kept in memory, compared by X: 425 & 0xFF = 169."""
    masked = program(LOAD_NUMBER, (0x54, 0, 0, 0xFF), (2, 0, 0, 3), (1, 0, 0, 169), (0x60, 0, 0, 3), (0x1D, 0, 1, 0),
                     (6, 0, 0, ERRNO), (6, 0, 0, ALLOW))  # fmt: skip
    assert confines(FILTER, [masked], FILTER, [denying(425)])
    assert confines(FILTER, [masked], FILTER, [denying(169, 425)])
    assert not confines(FILTER, [masked], FILTER, [denying(426)])


def test_a_program_without_end_of_ways_is_taken_for_one_that_allows_all() -> None:
    ways = [LOAD_ARGUMENT, (0x15, 0, 0, 1)] * 40
    assert not confines(FILTER, [program(*ways, (4, 0, 0, 1), (5, 0, 0, 0xFFFFFFF0))], FILTER, [denying(425)])
