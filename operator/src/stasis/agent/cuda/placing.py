"""Which GPU takes the place of which at a restore, and whether it can: asked before anything of the checkpoint runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stasis.agent import proctree
from stasis.agent.cuda.devices import CudaProcess
from stasis.agent.cuda.find import inner, minors
from stasis.agent.cuda.hardware import MIGRATION, Gpu, Hardware
from stasis.errors import Corrupt, Finding, Refused, RestoreFailed

_LIKE = "resume on a node like the one of the checkpoint (a node selector helps)"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of a rank's GPUs. `processes`: pid in the container -> UUIDs of the GPUs that it had."""

    driver: str  # version
    models: Mapping[str, str]  # UUID -> model, of those in use
    processes: Mapping[str, tuple[str, ...]]
    memory: int  # bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, hardware: Hardware, processes: tuple[CudaProcess, ...], memory: int) -> Saved:
        used = {uuid for one in processes for uuid in one.gpus}
        models = {gpu.uuid: gpu.model for gpu in hardware.gpus() if gpu.uuid in used}
        return cls(hardware.version, models, {str(one.inner): one.gpus for one in processes}, memory)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Saved:
        """Another party's bytes. Raises Corrupt."""
        driver, models, processes, memory = (data.get(one.name) for one in fields(cls))
        if not isinstance(driver, str) or not isinstance(memory, int):
            raise Corrupt("a rank's config does not say which driver its GPUs had")
        if not isinstance(models, dict) or not all(isinstance(model, str) for model in models.values()):
            raise Corrupt("a rank's config does not say which GPUs it had")
        if not isinstance(processes, dict) or not all(
            pid.isdigit() and isinstance(uuids, list) and all(uuid in models for uuid in uuids)
            for pid, uuids in processes.items()
        ):
            raise Corrupt("a rank's config does not say which processes had GPUs")
        return cls(driver, models, {pid: tuple(uuids) for pid, uuids in processes.items()}, memory)


def place(saved: Saved, here: list[Gpu], hardware: Hardware) -> dict[str, str]:
    """UUID at the checkpoint -> UUID here; each stays where it can. Raises Refused, or Unsupported."""
    if hardware.version != saved.driver:
        raise Refused(
            [
                _refusal(
                    f"the NVIDIA driver was {saved.driver} at the checkpoint and is {hardware.version or 'none'} here"
                )
            ]
        )
    hardware.driver()
    free = {gpu.uuid: gpu.model for gpu in here}
    placed = {uuid: uuid for uuid, model in saved.models.items() if free.get(uuid) == model}
    for uuid in placed:
        del free[uuid]
    for uuid, model in saved.models.items():
        if uuid in placed:
            continue
        other = next((one for one, its in free.items() if its == model), None)
        if other is None:
            raise Refused([_refusal(f"the checkpoint needs {_counted(saved.models)}, the container has {_gpus(here)}")])
        placed[uuid] = other
        del free[other]
    moved = [uuid for uuid, now in placed.items() if uuid != now]
    if moved and hardware.major < MIGRATION:
        cause = f"the processes would have to move to other GPUs, which the driver {hardware.version} cannot do"
        raise Refused([_refusal(cause, f"update the driver to {MIGRATION}, or resume on the same GPUs")])
    return placed


def restored(saved: Saved, pids: Iterable[int]) -> list[CudaProcess]:
    """Those of the restored processes that had GPUs. Raises RestoreFailed where one of them is missing."""
    by_inner = {str(inner(pid)): pid for pid in pids}
    if missing := saved.processes.keys() - by_inner.keys():
        raise RestoreFailed(f"the CUDA processes {', '.join(sorted(missing))} of the checkpoint were not restored")
    return [
        CudaProcess(by_inner[one], proctree.start_time(by_inner[one]), int(one), gpus)
        for one, gpus in saved.processes.items()
    ]


def of_container(pid1: int, hardware: Hardware) -> list[Gpu]:
    """The GPUs whose nodes a container has: what it may open is the runtime's to say, not read from here."""
    try:
        folder = os.open(f"/proc/{pid1}/root", os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"process {pid1} is gone") from gone
    try:  # no link of the tenant's is followed
        dev = os.open("dev", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return []
    finally:
        os.close(folder)
    try:
        nodes = minors({f"/dev/{name}" for name in os.listdir(dev)})
    finally:
        os.close(dev)
    return [gpu for gpu in hardware.gpus() if gpu.minor in nodes]


def _refusal(cause: str, remedy: str = _LIKE) -> Finding:
    return Finding(cause, remedy, where="GPU")


def _counted(models: Mapping[str, str]) -> str:
    names = list(models.values())
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def _gpus(here: list[Gpu]) -> str:
    return _counted({gpu.uuid: gpu.model for gpu in here}) or "none"
