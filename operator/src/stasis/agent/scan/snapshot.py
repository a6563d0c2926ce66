"""One reading of a running tree: its processes with their threads, descriptors and mappings.

Processes come and go while it is read, so everything is read once, and what is gone is left out. The reading changes
nothing: no signal, no ptrace, no descriptor of the program's is duplicated.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from stasis.agent import proctree
from stasis.agent.lookup import inner_pids

_WALKS = 4  # a tree that forks all the time is never seen twice alike
_MAPS = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<mode>\S{4}) \S+ (?P<device>\S+) (?P<inode>\d+) *(?P<path>.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Descriptor:
    """An open file. `target` is what its link in /proc says; `path` reaches the file itself."""

    pid: int
    fd: int
    target: str

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    @property
    def where(self) -> str:
        return f"fd {self.fd} -> {self.target}"

    @cached_property
    def status(self) -> os.stat_result | None:
        try:
            return os.stat(self.path)
        except OSError:
            return None

    @property
    def mode(self) -> int:
        return stat.S_IFMT(self.status.st_mode) if self.status else 0

    @cached_property
    def info(self) -> dict[str, str]:
        """The fields of its fdinfo: pos, flags (octal), mnt_id, ino, and what its kind adds; empty when closed."""
        try:
            with open(f"/proc/{self.pid}/fdinfo/{self.fd}") as file:
                fields = (line.partition(":") for line in file if ":" in line)
                return {name: value.strip() for name, _, value in fields}
        except OSError:
            return {}

    @property
    def flags(self) -> int:
        return int(self.info.get("flags", "0"), 8)

    def inode_of(self, kind: str) -> int:
        """The inode in a target of the form `kind:[inode]`, or 0."""
        found = re.fullmatch(rf"{kind}:\[(\d+)\]", self.target)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Mapping:
    """A mapping of a file or of a kernel object (anonymous memory is left out)."""

    pid: int
    range: str
    shared: bool
    writable: bool
    device: str
    inode: int
    path: str

    @property
    def where(self) -> str:
        return f"mapping {self.range} -> {self.path}"

    @property
    def file(self) -> tuple[str, int]:
        return self.device, self.inode


@dataclass(frozen=True)
class Process:
    pid: int
    inner: int  # its pid in its own PID namespace
    comm: str
    state: str
    parent: int
    start: int
    tracer: dict[int, int] = field(hash=False, compare=False)  # by traced thread

    @property
    def threads(self) -> list[int]:
        return proctree.tasks(self.pid)

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"

    @cached_property
    def descriptors(self) -> list[Descriptor]:
        return read_descriptors(self.pid)

    @cached_property
    def mappings(self) -> list[Mapping]:
        return read_mappings(self.pid)


@dataclass(frozen=True)
class Tree:
    """`pid1`: the container's init. `processes`: the trainer's tree, parents first, its root (the keeper) the first."""

    pid1: int
    processes: tuple[Process, ...]
    gpus: bool = False  # what is NVIDIA's is saved by its driver

    def saved(self, path: str) -> bool:
        return self.gpus and path.startswith("/dev/nvidia")

    @property
    def root(self) -> Process:
        return self.processes[0]

    @cached_property
    def pids(self) -> set[int]:
        return {process.pid for process in self.processes}

    @cached_property
    def by_pid(self) -> dict[int, Process]:
        return {process.pid: process for process in self.processes}

    @cached_property
    def living(self) -> list[Process]:
        return [process for process in self.processes if not process.zombie]

    def descriptors(self) -> Iterator[tuple[Process, Descriptor]]:
        for process in self.living:
            for descriptor in process.descriptors:
                yield process, descriptor

    def inodes(self, kind: str) -> set[int]:
        """The inodes of all the tree's descriptors of the form `kind:[inode]`."""
        return {descriptor.inode_of(kind) for _, descriptor in self.descriptors()} - {0}


def read_descriptors(pid: int) -> list[Descriptor]:
    """By number; empty when the process is gone."""
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                found.append(Descriptor(pid, int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
            except OSError:
                continue
    except OSError:
        return []
    return sorted(found, key=lambda descriptor: descriptor.fd)


def read_mappings(pid: int) -> list[Mapping]:
    """Those with a name: of files, devices and kernel objects; empty when the process is gone."""
    return [
        Mapping(
            pid,
            f"{found['start']}-{found['end']}",
            found["mode"][3] == "s",
            found["mode"][1] == "w",
            found["device"],
            int(found["inode"]),
            found["path"],
        )
        for found in _MAPS.finditer(proctree.read(pid, pid, "maps"))
        if found["path"]
    ]


def read_process(pid: int) -> Process | None:
    """None when it is gone."""
    text = proctree.read(pid, pid, "stat")
    inner = inner_pids(pid)
    if not text or not inner:
        return None
    comm = text[text.index("(") + 1 : text.rindex(")")]
    rest = text[text.rindex(")") + 2 :].split()
    tracers = {}
    for task in proctree.tasks(pid):
        found = re.search(r"^TracerPid:\s+([1-9]\d*)$", proctree.read(pid, task, "status"), re.MULTILINE)
        if found:
            tracers[task] = int(found[1])
    return Process(pid, inner[-1], comm, rest[0], int(rest[1]), int(rest[19]), tracers)


def read_tree(pid1: int, root: int) -> Tree:
    """The tree below `root`, walked until two walks agree. ProcessLookupError: its root is gone."""
    pids: list[int] = []
    for _ in range(_WALKS):
        before, pids = pids, list(proctree.walk(root))
        if before == pids:
            break
    processes = tuple(process for pid in pids if (process := read_process(pid)))
    if not processes or processes[0].pid != root or proctree.dead(root):
        raise ProcessLookupError(f"process {root} has ended")
    return Tree(pid1, processes)
