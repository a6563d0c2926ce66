"""A verdict follows from what a program printed and how it ended."""

import zlib

import pytest

from stasis.cases.verdict import Evidence, Verdict, judge

REFUSAL = "process 7 (python3), fd 3: an io_uring is open. Remedy: deny io_uring"


def chain(count: int) -> list[str]:
    crc, lines = 0, []
    for number in range(count):
        crc = zlib.crc32(b"%d" % number, crc)
        lines.append(f"step {number} {crc:08x} loss 1.5")
    return lines


WHOLE = [*chain(9), "note 3 metrics lost", "done"]


def verdict(evidence: Evidence, *, refusable: bool = True) -> Verdict:
    return judge(evidence, refusable=refusable)[0]


def test_an_unbroken_chain_over_both_containers_is_right() -> None:
    assert judge(Evidence(WHOLE, 0, 5), refusable=False) == (Verdict.RIGHT, "3 metrics lost")


def test_a_refusal_that_disturbed_nothing_is_in_time_where_the_case_allows_it() -> None:
    refused = Evidence(WHOLE, 0, refused=REFUSAL)
    assert judge(refused, refusable=True) == (Verdict.REFUSED, REFUSAL)
    assert verdict(refused, refusable=False) is Verdict.WRONG


def test_a_refusal_must_name_a_remedy() -> None:
    assert verdict(Evidence(WHOLE, 0, refused="no")) is Verdict.WRONG


@pytest.mark.parametrize(
    ("lines", "status", "why"),
    [
        ([*chain(5), *chain(9)[6:], "done"], 0, "step 6 follows step 4"),
        ([*chain(6), *chain(9)[5:], "done"], 0, "step 5 follows step 5"),
        ([*chain(6), *chain(9), "done"], 0, "step 0 follows step 5"),
        ([*chain(9)[1:], "done"], 0, "the first step is 1"),
        ([*chain(8), "step 8 00000000", "done"], 0, "checksum"),
        ([*chain(7), "CORRUPT content"], 3, "CORRUPT content"),
        ([*chain(7), "WATCHDOG no heartbeat"], 6, "WATCHDOG"),
        (chain(9), 0, "never said"),
        (chain(7), None, "hangs after step 6"),
        ([], None, "hangs before its first step"),
        (chain(7), 139, "exit status 139"),
        ([*chain(6), "done"], 0, "no step after the resume"),
    ],
)
def test_all_else_is_wrong_and_says_why(lines: list[str], status: int | None, why: str) -> None:
    found, detail = judge(Evidence(lines, status, 5), refusable=True)
    assert found is Verdict.WRONG
    assert why in detail


def test_what_a_refusal_disturbed_is_wrong() -> None:
    found, detail = judge(Evidence([*chain(7), "CORRUPT content"], 3, refused=REFUSAL), refusable=True)
    assert found is Verdict.WRONG
    assert "CORRUPT content" in detail
    assert REFUSAL in detail


def test_an_error_of_the_product_is_wrong_even_if_the_program_goes_on() -> None:
    assert judge(Evidence(WHOLE, 0, failed="CRIU failed"), refusable=True) == (Verdict.WRONG, "CRIU failed")
