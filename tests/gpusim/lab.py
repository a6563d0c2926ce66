"""A gang whose ranks have a simulated GPU each, on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gang.lab import Lab
from tests.gpusim.machine import Machine, device_descriptors, device_mappings

from stasis.agent.cuda.driver import Patience, State
from stasis.agent.cuda.hardware import Hardware
from stasis.agent.lookup import find_root
from stasis.agent.proctree import read, walk

HERE = Path(__file__).parent
NODE = (10, 229)  # as gpud's nodes
LIBRARY = "/usr/local/cudasim"


class GpuLab(Lab):
    """`gpus`: that of each rank at first."""

    def __init__(
        self,
        machine: Machine,
        name: str,
        folder: Path,
        ranks: int = 2,
        *,
        gpus: Sequence[int] = (0, 1),
        env: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        self.machine = machine
        self.hardware = Hardware()
        self._of_rank: dict[int, dict[str, object]] = {}
        self.give(gpus)
        super().__init__(
            name,
            folder,
            ranks,
            program="gpu_trainer.py",
            env={"LD_LIBRARY_PATH": LIBRARY, **(env or {})},
            options={
                "volumes": {"/code": HERE, "/gang": HERE.with_name("gang"), "/control": folder / "control"},
                "readonly": {LIBRARY: machine.sim, "/run/cudasim": machine.folder},
            },
            of_rank=self._of_rank,
            **options,  # type: ignore[arg-type]
        )

    def give(self, gpus: Sequence[int | None]) -> None:
        """From the next containers on: each rank's GPU, by number; None: none."""
        for rank, number in enumerate(gpus):
            names = [] if number is None else ["nvidiactl", f"nvidia{number}"]
            self._of_rank[rank] = {"devices": {f"/dev/{name}": NODE for name in names}}

    def cuda(self, rank: int) -> int:
        """The rank's CUDA process."""
        root = find_root(self.gang.places[rank].container.pid1).pid
        return next(pid for pid in walk(root) if read(pid, pid, "comm").startswith("python"))

    def states(self) -> list[State]:
        driver = self.hardware.driver()
        return [driver.state(self.cuda(rank), Patience(10.0)) for rank in range(self.ranks)]

    def on(self, rank: int) -> set[str]:
        """The GPUs that hold memory of a rank."""
        paths = {line.split()[5] for line in device_mappings(self.cuda(rank))}
        return paths - {"/dev/nvidiactl"}

    def holds(self, rank: int) -> bool:
        pid = self.cuda(rank)
        return bool(device_descriptors(pid) or device_mappings(pid))

    def close(self) -> None:
        super().close()
        self.hardware.close()
