"""What a stage takes: wall time, processor time, peak memory, bytes that come out of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

from stasis.errors import StasisError


class ToolFailed(StasisError):
    """A program that the benchmark compares with did not do its work."""


@dataclass(frozen=True)
class Cost:
    """Seconds, seconds, bytes, bytes. `peak`: resident memory of the largest process of the stage."""

    wall: float
    cpu: float
    peak: int
    size: int = 0


class Watch:
    """Follows programs to their end. Their peak memory is looked up while they live: what wait4() tells of it counts
    the memory of the process that started them, too."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._peaks: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            pids = [process.pid for process in self._processes]
            while pids:
                pid = pids.pop()
                with contextlib.suppress(OSError):
                    self._peaks[pid] = max(self._peaks.get(pid, 0), peak_memory(pid))
                    pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    def wait(self) -> tuple[float, int]:
        """Processor seconds of all with their children, and the peak memory of the largest."""
        cpu = 0.0
        for process in self._processes:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            cpu += usage.ru_utime + usage.ru_stime
        self._ended.set()
        self._thread.join()
        return cpu, max(self._peaks.values(), default=0)


def tools(*commands: Sequence[str | Path], folder: Path | None = None, stdout: Path | None = None) -> Cost:
    """Run programs as a pipeline, the last one's output into `stdout`, and wait for all of them."""
    started = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    with open(stdout or os.devnull, "wb") as output, tempfile.TemporaryFile() as said:
        source: int | IO[bytes] | None = subprocess.DEVNULL
        for command in commands:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=source,
                stdout=output if command is commands[-1] else subprocess.PIPE,
                stderr=said,
                cwd=folder,
            )
            if processes and processes[-1].stdout:
                processes[-1].stdout.close()  # so that the one before meets a broken pipe where this one ends
            source = process.stdout
            processes.append(process)
        cpu, peak = Watch(processes).wait()
        for process in processes:
            if process.returncode:
                said.seek(0)
                text = said.read().decode(errors="replace")[-1000:]
                raise ToolFailed(f"{process.args!r} failed with {process.returncode}: {text}")
    return Cost(time.monotonic() - started, cpu, peak)


class Meter:
    """Costs of this process and the children that it waits for, stage after stage."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self._name = ""
        self._since = (0.0, 0.0)

    def begin(self, name: str) -> None:
        """The stage before ends here."""
        self.end()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak
        self._name, self._since = name, (time.monotonic(), _processor())

    def end(self) -> None:
        if not self._name:
            return
        wall, cpu = (time.monotonic() - self._since[0], _processor() - self._since[1])
        if before := self.costs.get(self._name):  # draining and locking come again where something was in flight
            wall, cpu = wall + before.wall, cpu + before.cpu
        self.costs[self._name] = Cost(wall, cpu, peak_memory())
        self._name = ""


def _processor() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_memory(pid: int | None = None) -> int:
    """Bytes that were resident at most since the last reset; 0 of a process that has ended. OSError: it is gone."""
    for line in Path("/proc", str(pid or "self"), "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


class Samples:
    """All that was measured, by name, one value for each run."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self.costs: dict[str, list[Cost]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        self.values[name].append(value)

    def stage(self, name: str, cost: Cost) -> None:
        self.costs[name].append(cost)

    def clear(self) -> None:
        self.values.clear()
        self.costs.clear()

    def stages(self) -> dict[str, dict[str, float]]:
        """Medians."""
        return {
            name: {
                "wall": round(median(cost.wall for cost in costs), 4),
                "cpu": round(median(cost.cpu for cost in costs), 4),
                "peak": int(median(cost.peak for cost in costs)),
                "bytes": int(median(cost.size for cost in costs)),
            }
            for name, costs in self.costs.items()
        }
