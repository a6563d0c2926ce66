"""Was the training disturbed? Judged by its log alone.

Equal losses are not enough: a script that begins again at step 0 has them too. So every line also carries a number
drawn at the process's start and the pid: over all suspensions each step appears once, in order, the number and the pid
never change, and the losses are the undisturbed run's, digit for digit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LINE = re.compile(r"^step (\d+) rank (\d+) loss (\S+) number ([0-9a-f]{8}) pid (\d+)$")


@dataclass(frozen=True)
class Step:
    number: int
    loss: str
    nonce: str
    pid: int


def steps(lines: Sequence[str]) -> list[Step]:
    """The steps that a rank's log reports."""
    found = (LINE.match(line) for line in lines)
    return [Step(int(match[1]), match[3], match[4], int(match[5])) for match in found if match]


def differences(logs: Mapping[int, Sequence[str]], undisturbed: Mapping[int, Sequence[str]]) -> list[str]:
    """What is wrong with the `logs` of a gang, by rank, against an undisturbed run's; empty where nothing is."""
    wrong = []
    for rank, lines in sorted(logs.items()):
        mine, reference = steps(lines), steps(undisturbed[rank])
        numbers = [step.number for step in mine]
        if numbers != list(range(len(numbers))):
            odd = next(i for i, number in enumerate(numbers) if number != i)
            wrong.append(f"rank {rank}: step {numbers[odd]} follows step {numbers[odd - 1] if odd else 'nothing'}")
        if len(mine) != len(reference):
            wrong.append(f"rank {rank}: {len(mine)} steps, {len(reference)} in the undisturbed run")
        for field in ("nonce", "pid"):
            if len({getattr(step, field) for step in mine}) > 1:
                wrong.append(f"rank {rank}: the {field} changed: it is not the same process all along")
        for step, other in zip(mine, reference, strict=False):
            if step.loss != other.loss:
                wrong.append(f"rank {rank}: loss {step.loss} at step {step.number}, undisturbed {other.loss}")
                break
    return wrong
