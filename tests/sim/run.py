"""Run schedules of the gang protocol: `python -m tests.sim.run --schedules 100000`, one alone: `--seed N --trace`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.sim.setting import Setting
from tests.sim.simulation import Coverage, Result, Simulation

from stasis.core.gang import Coordinator
from stasis.core.guardian import Guardian
from stasis.core.member import Member

CHUNK = 250
COMMAND = "PYTHONPATH=operator/src python -m tests.sim.run --seed {seed} --schedules 1 --trace"


@dataclass
class Summary:
    schedules: int = 0
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)  # seed, what
    coverage: Coverage = field(default_factory=set)

    def add(self, other: Summary) -> None:
        self.schedules += other.schedules
        self.events += other.events
        self.outcomes += other.outcomes
        self.failures += other.failures
        self.coverage |= other.coverage

    def missing(self) -> list[str]:
        """Pairs of state and event that the tables name and no schedule came to."""
        named = {(machine.__name__, *pair) for machine in (Coordinator, Member, Guardian) for pair in machine.TABLE}
        return sorted(f"{machine}: {state} x {event.__name__}" for machine, state, event in named - self.coverage)


def one(seed: int, summary: Summary, setting: Setting | None = None) -> Result | None:
    """Run one schedule; a violation, or an error of any kind, is noted with its seed."""
    try:
        result = Simulation(seed, setting, coverage=summary.coverage).run()
    except Exception:
        summary.failures.append((seed, traceback.format_exc(limit=-3)))
        return None
    summary.schedules += 1
    summary.events += result.events
    summary.outcomes.update(result.outcomes)
    if result.violation:
        summary.failures.append((seed, str(result.violation)))
    return result


def chunk(seeds: range) -> Summary:
    summary = Summary()
    for seed in seeds:
        one(seed, summary)
    return summary


def run(first: int, schedules: int, processes: int, *, progress: bool = False) -> Summary:
    total, started = Summary(), time.monotonic()
    chunks = [range(n, min(n + CHUNK, first + schedules)) for n in range(first, first + schedules, CHUNK)]
    for done in _map(chunks, processes):
        total.add(done)
        if progress:
            rate = total.schedules / (time.monotonic() - started)
            print(f"\r{total.schedules} of {schedules}, {rate:.0f}/s", end="", file=sys.stderr, flush=True)
        if len(total.failures) >= 20:
            break
    if progress:
        print(file=sys.stderr)
    return total


def _map(chunks: list[range], processes: int) -> Iterator[Summary]:
    if processes == 1:
        yield from map(chunk, chunks)
    else:
        with multiprocessing.Pool(processes) as pool:
            yield from pool.imap_unordered(chunk, chunks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--trace", action="store_true", help="print all that happens in the first schedule")
    options = parser.parse_args()
    if options.trace:
        result = Simulation(options.seed, trace=print).run()
        print(result)
        return 1 if result.violation else 0
    started = time.monotonic()
    summary = run(options.seed, options.schedules, options.processes, progress=sys.stderr.isatty())
    seconds = time.monotonic() - started
    print(f"{summary.schedules} schedules, {summary.events} events, {seconds:.0f} s")
    for outcome, count in sorted(summary.outcomes.items()):
        print(f"  {outcome}: {count}")
    for pair in summary.missing():
        print(f"not visited: {pair}")
    for seed, what in sorted(summary.failures):
        print(f"FAILED {what.rstrip()}\n  {COMMAND.format(seed=seed)}")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
