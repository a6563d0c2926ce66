"""The GPUs of this node and their driver, as /proc/driver/nvidia and nvidia-smi tell them; and who drives them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from stasis.agent.criu import Journal
from stasis.agent.cuda.api import ApiDriver
from stasis.agent.cuda.cli import CliDriver
from stasis.agent.cuda.driver import CudaError, Driver
from stasis.errors import Unsupported

# What drivers can do, by their major version.
ACTIONS, TIMEOUTS, MIGRATION = 555, 570, 580
SMI_SECONDS = 30.0


@dataclass(frozen=True)
class Gpu:
    uuid: str  # GPU-...
    model: str
    minor: int  # of its node /dev/nvidiaN


def _setting(name: str, otherwise: str = "") -> str:
    return os.environ.get(name) or otherwise


@dataclass
class Hardware:
    """Settings are of the environment, for nodes where things lie elsewhere than NVIDIA's packages put them."""

    journal: Journal = contextlib.nullcontext
    proc: Path = field(default_factory=lambda: Path(_setting("STASIS_NVIDIA_PROC", "/proc/driver/nvidia")))
    _driver: Driver | None = None
    _choosing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def version(self) -> str:
        """Of the kernel's driver: "580.65.06"; empty: there is none."""
        try:
            found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", (self.proc / "version").read_text())
        except OSError:
            return ""
        return found[1] if found else ""

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0] or 0) if self.version else 0

    def gpus(self) -> list[Gpu]:
        found = []
        for path in sorted(self.proc.glob("gpus/*/information")):
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            values = {name.strip(): value.strip() for name, value in fields.items()}
            if values.get("Device Minor", "").isdigit():
                found.append(Gpu(values.get("GPU UUID", ""), values.get("Model", ""), int(values["Device Minor"])))
        return found

    def driver(self) -> Driver:
        """Chosen once. Raises Unsupported: why no checkpoint of a GPU can be taken on this node."""
        with self._choosing:
            if self._driver is None:
                self._driver = self._choose()
            return self._driver

    def _choose(self) -> Driver:
        wanted, causes = _setting("STASIS_CUDA_DRIVER"), []
        if self.major < ACTIONS:
            raise Unsupported(
                f"the NVIDIA driver {self.version or '(none)'} has no lock and checkpoint actions",
                remedy=f"update the driver of this node: {ACTIONS} at least, {MIGRATION} to restore on other GPUs",
            )
        if self.major >= TIMEOUTS and wanted in ("", "api"):
            api = ApiDriver(self.env, _setting("STASIS_CUDA_BINDINGS"), journal=self.journal)
            try:
                api.probe()
            except CudaError as error:
                causes.append(f"{api.name}: {error.text}")
            else:
                return api
        if wanted in ("", "cli"):
            binary = _setting("STASIS_CUDA_CHECKPOINT", "cuda-checkpoint")
            if found := shutil.which(binary):
                return CliDriver(found, self.env, timeouts=self.major >= TIMEOUTS, journal=self.journal)
            causes.append(f"no {binary} in the agent's PATH")
        raise Unsupported(
            f"nothing drives this node's GPUs ({'; '.join(causes)})",
            remedy="give the agent NVIDIA's cuda-checkpoint, or the Python package cuda-bindings",
        )

    @property
    def env(self) -> dict[str, str]:
        """Of children that call the driver."""
        libraries = _setting("STASIS_CUDA_LIBRARIES")
        return {**os.environ, **({"LD_LIBRARY_PATH": libraries} if libraries else {})}

    def memory(self, pids: set[int]) -> int:
        """Bytes on devices that these processes hold. Raises Unsupported where that cannot be found out."""
        command = [_setting("STASIS_NVIDIA_SMI", "nvidia-smi"), "--query-compute-apps=pid,used_memory"]
        try:
            done = subprocess.run(
                [*command, "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                env=self.env,
                timeout=SMI_SECONDS,
                check=True,
            )
            rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
            return sum(int(used) for pid, used in rows if int(pid) in pids) << 20
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise Unsupported(
                f"how much GPU memory the processes hold cannot be found out ({error})",
                remedy="give the agent a working nvidia-smi",
            ) from error

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None
