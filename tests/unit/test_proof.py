"""The proof of an undisturbed training sees each way in which one can be disturbed."""

import pytest

from stasis.demo.proof import differences


def log(*steps: int, nonce: str = "0badcafe", pid: int = 9, shift: int = 0) -> list[str]:
    return [f"step {i} rank 0 loss {5 - i / 10 + shift:.3f} number {nonce} pid {pid}" for i in steps]


GOOD = {0: log(*range(6))}


def test_the_same_log_is_undisturbed() -> None:
    assert differences({0: ["noise", *log(*range(6)), "done"]}, GOOD) == []


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (log(0, 1, 2, 2, 3, 4, 5), "follows"),
        (log(0, 1, 3, 4, 5), "follows"),
        (log(0, 1, 2), "steps"),
        (log(0, 1, 2) + log(3, 4, 5, nonce="deadbeef"), "nonce"),
        (log(0, 1, 2) + log(3, 4, 5, pid=11), "pid"),
        (log(0, 1, 2) + log(3, 4, 5, shift=1), "loss"),
        (log(0, 1, 2) + log(*range(6), nonce="deadbeef"), "follows"),
    ],
    ids=["repeated", "lost", "cut", "other process", "other pid", "other loss", "began again"],
)
def test_a_disturbed_one_is_seen(lines: list[str], word: str) -> None:
    assert any(word in difference for difference in differences({0: lines}, GOOD))
