"""What a collective costs more with the handle, in microseconds: `python -m tests.collectives.overhead`."""

import tempfile
from pathlib import Path

from tests.collectives import lab

RUNS = 3


def cost(torch: str, active: bool) -> float:
    with tempfile.TemporaryDirectory() as folder, lab.gang(Path(folder), "overhead", torch, active=active) as gang:
        return min(float(text) for text in gang.wait())


def main() -> None:
    for torch in lab.SCRIPTS:
        plain, handled = (min(cost(torch, active) for _ in range(RUNS)) for active in (False, True))
        print(f"{torch}: {plain:.1f} us without, {handled:.1f} us with, {handled - plain:.1f} us more")


if __name__ == "__main__":
    main()
