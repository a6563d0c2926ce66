"""What a checkpoint of a tree takes, and its restore, counted before the freeze."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from stasis.agent import proctree
from stasis.agent.lookup import Root, inner_thread
from stasis.agent.scan.snapshot import Process, Tree, read_tree

_KIB = 10
_SECTOR = 512  # of st_blocks
_ANONYMOUS_SHARED = ("/dev/zero (deleted)", "/memfd:", "/SYSV")
_HUGE = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ \S{3}(?P<kind>[sp]) \S+ (?P<file>\S+ \d+)(?:\n(?!VmFlags)|.)*?"
    r"\nKernelPageSize:\s+(?P<size>\d+) kB(?:\n(?!VmFlags)|.)*?"
    r"\nShared_Hugetlb:\s+(?P<shared>\d+) kB\nPrivate_Hugetlb:\s+(?P<private>\d+) kB",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Needs:
    """Bytes and counts; pids are the container's own."""

    private: int  # anonymous and private dirty memory: a copy for every process, as CRIU writes it
    shared: int  # memfds and shared anonymous memory: once each
    ghosts: int  # contents of unlinked files that are still open: once each
    huge_pages: dict[int, int] = field(default_factory=dict)  # size of a page -> pages in use
    descriptors: int = 0
    processes: int = 0
    threads: int = 0
    last_pid: int = 0  # the highest of processes and threads
    stopped: tuple[int, ...] = ()  # processes that a signal has stopped

    @property
    def memory(self) -> int:
        """Bytes that CRIU's page images will have, about: pages come and go until the freeze."""
        return self.private + self.shared + sum(size * count for size, count in self.huge_pages.items())

    @property
    def total(self) -> int:
        return self.memory + self.ghosts

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def needs(pid1: int, root: Root) -> Needs:
    """ProcessLookupError: the tree is gone."""
    tree = read_tree(pid1, root.pid)
    huge: dict[int, int] = {}
    files: dict[str, tuple[int, int]] = {}  # of shared mappings, counted once
    private = 0
    for process in tree.living:
        rollup = proctree.read(process.pid, process.pid, "smaps_rollup")
        private += _kib(rollup, "Anonymous") + _kib(rollup, "Swap")
        if _kib(rollup, "Private_Hugetlb") + _kib(rollup, "Shared_Hugetlb"):
            for file, size, pages in _huge_pages(process):
                if file:
                    files[file] = max(files.get(file, (size, 0)), (size, pages))
                else:
                    huge[size] = huge.get(size, 0) + pages
    for size, pages in files.values():
        huge[size] = huge.get(size, 0) + pages
    threads = [inner_thread(process.pid, thread) for process in tree.living for thread in process.threads]
    return Needs(
        private=private,
        shared=sum(_shared(tree).values()),
        ghosts=sum(_ghosts(tree).values()),
        huge_pages=huge,
        descriptors=sum(len(process.descriptors) for process in tree.living),
        processes=len(tree.processes),
        threads=len(threads),
        last_pid=max([*threads, *(process.inner for process in tree.processes)]),
        stopped=tuple(process.inner for process in tree.processes if process.state == "T"),
    )


def _kib(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << _KIB if found else 0


def _huge_pages(process: Process) -> Iterator[tuple[str, int, int]]:
    """File (of a shared mapping), size of a page in bytes, pages in use."""
    for found in _HUGE.finditer(proctree.read(process.pid, process.pid, "smaps")):
        size, used = int(found["size"]), int(found["shared"]) + int(found["private"])
        if used:
            yield found["file"] if found["kind"] == "s" else "", size << _KIB, used // size


def _shared(tree: Tree) -> dict[tuple[int, int], int]:
    """Bytes of memory that has no file in the container, by device and inode."""
    found = {}
    for process in tree.living:
        for mapping in process.mappings:
            if mapping.path.startswith(_ANONYMOUS_SHARED):
                start, _, end = mapping.range.partition("-")
                path = f"/proc/{process.pid}/map_files/{int(start, 16):x}-{int(end, 16):x}"
                found.update(_used(path))
        for descriptor in process.descriptors:
            if descriptor.target.startswith("/memfd:"):
                found.update(_used(descriptor.path))
    return found


def _ghosts(tree: Tree) -> dict[tuple[int, int], int]:
    found = {}
    for _, descriptor in tree.descriptors():
        if descriptor.target.startswith("/") and not descriptor.target.startswith("/memfd:"):
            status = descriptor.status
            if status and status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                found[status.st_dev, status.st_ino] = status.st_blocks * _SECTOR
    return found


def _used(path: str) -> dict[tuple[int, int], int]:
    try:
        status = os.stat(path)
    except OSError:
        return {}
    return {(status.st_dev, status.st_ino): status.st_blocks * _SECTOR}
