"""What people would use: `criu dump`, tar, zstd, oras, and the same backwards.

CRIU is the project's bundle with the product's own options, less the streaming: the comparison is of the data path.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Cost, ToolFailed, Watch, tools
from stasis.agent import lookup, provision
from stasis.agent.criu import COMMON, LOADER, container_cgroups, explain
from stasis.agent.freezer import Freezer
from stasis.agent.launch import enter
from stasis.agent.volume import write_word
from stasis.local.container import Container

DUMP = ("--leave-running", "--network-lock", "skip", "--ghost-limit", str(1 << 40))


@dataclass(frozen=True)
class Dumped:
    """A folder of CRIU's images, and what the restore needs besides."""

    images: Path
    root: int
    last_pid: int
    stdio: dict[str, int]

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.images.iterdir())


def dump(container: Container, images: Path, *, release: bool) -> tuple[Dumped, Cost]:
    """Freeze the tree, dump it, then kill it or let it go on. The cost counts from the freeze to the dump's end."""
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    pid1 = lookup.find_pid1(container.id)
    root = lookup.find_root(pid1)
    inner = lookup.inner_pids(root.pid)[-1]
    with Freezer.of(pid1, container_id=container.id) as freezer:
        freezer.gather(root.pid)
        started = time.monotonic()
        try:
            pids = freezer.freeze()
            cost = _criu(
                pid1,
                images,
                ["dump", "-t", str(inner), "--freeze-cgroup", f"/proc/self/fd/{freezer.fd}", *COMMON, *DUMP],
                [freezer.fd],
            )
            wall = time.monotonic() - started
            last = max(number for pid in pids for number in lookup.inner_pids(pid)[-1:])
            last = max(last, *(lookup.inner_thread(pid, task) for pid in pids for task in _tasks(pid)))
            dumped = Dumped(images, inner, last, _stdio(pid1))
            if release:
                write_word(pid1, "word", "released")
                freezer.kill()
        finally:
            freezer.thaw()
    return dumped, Cost(wall, cost.cpu, cost.peak, dumped.size)


def restore(container: Container, dumped: Dumped) -> Cost:
    """Restore into a placeholder and let it run."""
    pid1 = lookup.find_pid1(container.id)
    with Freezer.of(pid1, container_id=container.id) as freezer:
        freezer.create()
        started = time.monotonic()
        raise_pid = f"echo {dumped.last_pid + 100} > /proc/sys/kernel/ns_last_pid"
        enter(pid1, ["/bin/sh", "-c", raise_pid], namespaces="p").wait()
        inherit = {name: os.open(f"/proc/{pid1}/fd/{fd}", os.O_WRONLY) for name, fd in dumped.stdio.items()}
        try:
            arguments = ["restore", "-d", *COMMON]
            for name, fd in inherit.items():
                arguments += ["--inherit-fd", f"fd[{fd}]:{name}"]
            groups = container_cgroups(pid1, Path(freezer.path))
            cost = _criu(pid1, dumped.images, arguments, list(inherit.values()), groups)
        finally:
            for fd in inherit.values():
                os.close(fd)
        write_word(pid1, "word", f"restored {dumped.root}")
        return Cost(time.monotonic() - started, cost.cpu, cost.peak, dumped.size)


def _criu(pid1: int, images: Path, arguments: list[str], fds: list[int], cgroups: list[Path] | None = None) -> Cost:
    bundle = provision.criu()
    with tempfile.TemporaryFile() as output:
        own = [os.open(bundle, os.O_PATH), os.open(images, os.O_PATH)]
        try:
            program, folder = (f"/proc/self/fd/{fd}" for fd in own)
            argv = [f"{program}/{LOADER}", "--library-path", program, f"{program}/criu", *arguments]
            argv += ["-D", folder, "-W", folder, "-o", "criu.log", "--lib", f"{program}/lib"]
            started = time.monotonic()
            process = enter(pid1, argv, fds=[*own, *fds], cgroups=cgroups or [], env={}, output=output.fileno())
            cpu, peak = Watch([process]).wait()
        finally:
            for fd in own:
                os.close(fd)
        if process.returncode:
            output.seek(0)
            log = output.read().decode(errors="replace")
            if (path := images / "criu.log").exists():
                log += path.read_text(errors="replace")
            raise ToolFailed(f"criu {arguments[0]} failed: {explain(log, process.returncode)}")
        (images / "criu.log").unlink(missing_ok=True)
        wall = time.monotonic() - started
        return Cost(wall, cpu, peak)


def _tasks(pid: int) -> list[int]:
    return [int(task) for task in os.listdir(f"/proc/{pid}/task")]


def _stdio(pid1: int) -> dict[str, int]:
    ends = ((fd, os.readlink(f"/proc/{pid1}/fd/{fd}")) for fd in (2, 1))
    return {target: fd for fd, target in ends if target.startswith("pipe:")}


def sync(folder: Path) -> float:
    """Seconds until every image is on the disk."""
    started = time.monotonic()
    for path in (*folder.iterdir(), folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return time.monotonic() - started


def pack(dumped: Dumped, archive: Path, *, threads: int) -> Cost:
    """tar | zstd -1; `threads` 0: one for each processor."""
    compress = ["zstd", "-q", "-1", f"-T{threads}", "-c"]
    cost = tools(["tar", "-C", dumped.images, "-cf", "-", "."], compress, stdout=archive)
    return Cost(cost.wall, cost.cpu, cost.peak, archive.stat().st_size)


def push(oras: Path, archive: Path, reference: str) -> Cost:
    file = f"{archive.name}:application/zstd"
    cost = tools([oras, "push", "--plain-http", reference, file], folder=archive.parent)
    return Cost(cost.wall, cost.cpu, cost.peak, archive.stat().st_size)


def pull(oras: Path, reference: str, archive: Path) -> Cost:
    """`archive` is named as the one that was pushed."""
    shutil.rmtree(archive.parent, ignore_errors=True)
    archive.parent.mkdir(parents=True)
    cost = tools([oras, "pull", "--plain-http", reference, "-o", archive.parent])
    return Cost(cost.wall, cost.cpu, cost.peak, archive.stat().st_size)


def unpack(archive: Path, images: Path) -> Cost:
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    cost = tools(["zstd", "-q", "-dc", archive], ["tar", "-C", images, "-xf", "-"])
    return Cost(cost.wall, cost.cpu, cost.peak, sum(file.stat().st_size for file in images.iterdir()))
