"""Right, refused in time, or wrong: judged by what a program printed and how it ended."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

STEP = re.compile(r"^step (\d+) ([0-9a-f]{8})\b")


class Verdict(StrEnum):
    RIGHT = "right"  # it survived, exactly
    REFUSED = "refused in time"  # and nothing had been touched
    WRONG = "wrong"
    NOT_SHOWN = "not shown"  # cannot be tried on this machine


@dataclass(frozen=True)
class Evidence:
    """What became of a case. `lines`: of all its containers, in order; `status`: of the last one, None: still running.

    `refused`: why the suspend was refused, or the resume into a world that is too small. `failed`: any other error of
    the product's.
    """

    lines: Sequence[str] = field(default_factory=tuple)
    status: int | None = None
    suspended: int | None = None  # the last step before the suspend
    refused: str = ""
    failed: str = ""


def steps(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Numbers and checksums of the steps that a log reports."""
    return [(int(match[1]), match[2]) for match in map(STEP.match, lines) if match]


def disturbance(lines: Sequence[str]) -> str:
    """What is wrong with the chain of steps; empty: nothing."""
    chain, previous = 0, -1
    for number, checksum in steps(lines):
        if number != previous + 1:
            return f"step {number} follows step {previous}" if previous >= 0 else f"the first step is {number}"
        chain = zlib.crc32(b"%d" % number, chain)
        if checksum != f"{chain:08x}":
            return f"step {number} has the checksum {checksum}, not {chain:08x}"
        previous = number
    return ""


def judge(evidence: Evidence, *, refusable: bool) -> tuple[Verdict, str]:
    """The verdict and, in a few words, why."""
    if evidence.failed:
        return Verdict.WRONG, evidence.failed
    if wrong := _ended_badly(evidence):
        return Verdict.WRONG, f"{wrong} (it had been refused: {evidence.refused})" if evidence.refused else wrong
    if not evidence.refused:
        return Verdict.RIGHT, _notes(evidence.lines)
    if not refusable:
        return Verdict.WRONG, f"it should survive but was refused: {evidence.refused}"
    if "Remedy: " not in evidence.refused:
        return Verdict.WRONG, f"refused without a remedy: {evidence.refused}"
    return Verdict.REFUSED, evidence.refused


def _ended_badly(evidence: Evidence) -> str:
    said = next((line for line in evidence.lines if line.startswith(("CORRUPT", "WATCHDOG"))), "")
    if said:
        return said
    if evidence.status is None:
        last = steps(evidence.lines)[-1:]
        return f"it hangs after step {last[0][0]}" if last else "it hangs before its first step"
    if wrong := disturbance(evidence.lines):
        return wrong
    if evidence.status != 0:
        return f"exit status {evidence.status}: {' | '.join(evidence.lines[-3:])}"
    if "done" not in evidence.lines:
        return "exit status 0, but it never said `done`"
    if evidence.suspended is not None and not evidence.refused and steps(evidence.lines)[-1][0] <= evidence.suspended:
        return f"no step after the resume: the last one is {evidence.suspended}"
    return ""


def _notes(lines: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(line.removeprefix("note ") for line in lines if line.startswith("note ")))
