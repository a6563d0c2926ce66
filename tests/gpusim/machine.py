"""A machine with simulated GPUs: gpud, what its agent's environment says, and programs that use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
UUIDS = [f"{n:02x}000000000000000000000000000{n:03x}" for n in range(1, 9)]


def dashed(uuid: str) -> str:
    return f"GPU-{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"


@cache
def built() -> Path:
    """The simulator, as tools/gpusim.sh builds it."""
    done = subprocess.run([ROOT / "tools/gpusim.sh"], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[-1])


class Machine:
    """`folder` is its gpud's; GPUs have the UUIDs of `UUIDS` by their number."""

    def __init__(
        self,
        folder: Path,
        chips: Sequence[str] = ("H100", "H100"),
        *,
        mib: int = 512,
        bandwidth: str = "0:0",
        driver: str = "580.65.06",
    ) -> None:
        self.folder = folder
        self.sim = built()
        folder.mkdir(parents=True)
        gpus = [f"{uuid}:{chip}:{mib}" for uuid, chip in zip(UUIDS, chips, strict=False)]
        self._gpud = subprocess.Popen(
            [sys.executable, self.sim / "gpud.py", "--dir", folder, "--bandwidth", bandwidth, "--driver", driver]
            + [word for gpu in gpus for word in ("--gpu", gpu)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._gpud.stdout is not None
        assert self._gpud.stdout.readline() == b"ready\n"

    @property
    def env(self) -> dict[str, str]:
        """Of an agent on this machine."""
        return {
            "STASIS_NVIDIA_PROC": str(self.folder / "proc"),
            "STASIS_CUDA_CHECKPOINT": str(self.sim / "cuda-checkpoint"),
            "STASIS_CUDA_BINDINGS": str(self.sim / "python"),
            "STASIS_CUDA_LIBRARIES": str(self.sim),
            "STASIS_NVIDIA_SMI": str(self.sim / "nvidia-smi"),
            "CUDASIM_SOCKET": str(self.folder / "socket"),
            "CUDASIM_DEV": str(self.folder / "dev"),
        }

    @property
    def program_env(self) -> dict[str, str]:
        return {**os.environ, **self.env, "LD_LIBRARY_PATH": str(self.sim)}

    @contextmanager
    def program(self, mode: str = "count", **env: str) -> Iterator[Program]:
        """`program.py` on the host, with all GPUs."""
        one = Program(mode, {**self.program_env, **env})
        try:
            yield one
        finally:
            one.end()

    def faults(self, *rules: Mapping[str, object]) -> None:
        """See gpud.py; of a rule's `times` nothing is left over from before."""
        new = self.folder / "faults.new"
        new.write_text(json.dumps(rules))
        new.replace(self.folder / "faults.json")

    def cli(self, *arguments: object, timeout: float = 10.0) -> tuple[int, str, str]:
        """cuda-checkpoint: status, output, the first paragraph of its errors."""
        done = subprocess.run(
            [self.sim / "cuda-checkpoint", *map(str, arguments)],
            env=self.program_env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout.strip(), done.stderr.split("\n\n")[0].strip()

    def close(self) -> None:
        self._gpud.kill()
        self._gpud.wait()


class Program:
    """A CUDA program that prints a line for each step."""

    def __init__(self, mode: str, env: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, PROGRAM, mode], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=dict(env)
        )
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self.lines: list[str] = []
        self._rest = ""
        self.pid = self._child.pid
        self.wait_for(1)

    def read(self) -> list[str]:
        assert self._child.stdout is not None
        while piece := self._read():
            *whole, self._rest = (self._rest + piece).split("\n")
            self.lines += whole
        return self.lines

    def _read(self) -> str:
        assert self._child.stdout is not None
        try:
            return os.read(self._child.stdout.fileno(), 65536).decode()
        except BlockingIOError:
            return ""

    def wait_for(self, more: int, seconds: float = 10.0) -> None:
        """Until so many more lines have come."""
        wanted, end = len(self.read()) + more, time.monotonic() + seconds
        while len(self.read()) < wanted:
            assert time.monotonic() < end, f"no {more} more lines: {self.lines[-3:]}"
            time.sleep(0.01)

    def still(self, seconds: float = 0.3) -> bool:
        """Whether no line comes for a while."""
        time.sleep(0.05)
        before = len(self.read())
        time.sleep(seconds)
        return len(self.read()) == before

    def status(self) -> int | None:
        return self._child.poll()

    def wait(self, seconds: float = 10.0) -> int:
        return self._child.wait(seconds)

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()


def device_mappings(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/nvidia" in line]


def device_descriptors(pid: int) -> list[str]:
    targets = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    return sorted(target for target in targets if "/dev/nvidia" in target)  # also in the folder of gpud


def bytes_held(pid: int) -> int:
    """On devices."""
    total = 0
    for line in device_mappings(pid):
        start, end = line.split()[0].split("-")
        total += int(end, 16) - int(start, 16) if line.split()[5] != "/dev/nvidiactl" else 0
    return total
