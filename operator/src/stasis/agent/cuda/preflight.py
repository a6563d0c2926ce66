"""What the driver's checkpoint cannot do, found before anything is locked: refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from stasis.agent import proctree, room
from stasis.agent.cuda.driver import CudaError, Patience, State
from stasis.agent.cuda.find import holders
from stasis.agent.cuda.hardware import Hardware
from stasis.agent.scan.snapshot import read_mappings
from stasis.errors import Finding, ResourceShort, Unsupported

LOOK_SECONDS = 20.0
_MIG = "/dev/nvidia-caps/nvidia-cap"
_FABRIC = "/dev/nvidia-caps-imex-channels/"
# NCCL maps memory of other processes by these, which comes back as an error or never.
_NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}


def findings(root: int, hardware: Hardware) -> list[Finding]:
    """Of the processes below `root` that hold a GPU."""
    found = holders(root)
    try:
        if found:
            hardware.driver()
    except Unsupported as why:
        return [
            Finding(f"an NVIDIA GPU is in use, and {why.message}", why.remedy, pid, _comm(pid), min(held))
            for pid, held in found.items()
        ]
    return [one for pid, held in found.items() for one in _of(pid, held, len(found), hardware)]


def _of(pid: int, held: set[str], count: int, hardware: Hardware) -> Iterator[Finding]:
    def refuse(cause: str, remedy: str, where: str = "") -> Finding:
        return Finding(cause, remedy, pid, _comm(pid), where)

    for path in sorted(held):
        if path.startswith(_MIG):
            yield refuse("a MIG instance is in use, which CUDA cannot checkpoint", "give the job whole GPUs", path)
        if path.startswith(_FABRIC):
            yield refuse(
                "memory is shared over NVLink between nodes (IMEX), which CUDA cannot checkpoint",
                "set NCCL_MNNVL_ENABLE=0 and NCCL_NVLS_ENABLE=0, and run without an IMEX channel",
                path,
            )
    env = _environment(pid)
    if "CUDA_MPS_PIPE_DIRECTORY" in env or os.path.exists(f"/proc/{pid}/root/tmp/nvidia-mps/control"):
        yield refuse("CUDA runs through MPS, which it cannot checkpoint", "run the job without the MPS daemon")
    lacking = [f"{name}={value}" for name, value in _NCCL.items() if env.get(name) != value]
    if count > 1 and lacking and any("/libnccl.so" in mapping.path for mapping in read_mappings(pid)):
        yield refuse(
            "NCCL may have mapped device memory of the container's other processes, which CUDA cannot restore",
            f"set {' '.join(lacking)} in the container",
        )
    try:
        state = hardware.driver().state(pid, Patience(LOOK_SECONDS))
    except CudaError as error:
        if error.text == "initialization error":
            yield refuse(
                "it inherited a GPU from the process that forked it, and CUDA does not know it",
                "start processes by spawn or forkserver, or before CUDA is initialised",
                min(held),
            )
        else:
            yield refuse(f"its CUDA state cannot be told: {error.text}", "see the driver's own logs", min(held))
        return
    if state is not State.RUNNING:
        yield refuse(
            f"its CUDA state is {state}: somebody else has begun to checkpoint it",
            f"`cuda-checkpoint --action {'restore' if state is State.CHECKPOINTED else 'unlock'} --pid {pid}` on its "
            "node, unless that is still at work",
        )


def memory(pid1: int, root: int, hardware: Hardware) -> int:
    """Bytes that the processes below `root` hold on GPUs. They will be in host memory, charged to the container of
    `pid1`: raises ResourceShort where its limit leaves no room, for who goes beyond it is killed."""
    found = set(holders(root))
    size = hardware.memory(found) if found else 0
    left = room.memory_left(pid1, reclaimable=True)
    if size > left:
        raise ResourceShort(
            f"{size >> 20} MiB of GPU memory have to go to the container's memory, whose limit leaves {left >> 20} MiB",
            remedy="raise the container's memory limit by what its processes hold on GPUs",
        )
    return size


def _comm(pid: int) -> str:
    return proctree.read(pid, pid, "comm")


def _environment(pid: int) -> Mapping[str, str]:
    """That the process was started with."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = (word.decode(errors="replace").partition("=") for word in file.read().split(b"\0"))
            return {name: value for name, _, value in words}
    except OSError:
        return {}
