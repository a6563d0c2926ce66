"""What is taken from a frozen tree: CRIU's images and the files that the container wrote.

A tree that will be released lends its pages (by reference) and its files until they are stored; of one that goes on
both are copied here, and it can be thawed at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stasis.agent import lookup, names, proctree
from stasis.agent.criu import Criu
from stasis.agent.files import remaps
from stasis.agent.files.capture import Capture as AreaCapture
from stasis.agent.files.capture import areas, capture
from stasis.agent.network import images
from stasis.agent.network.translate import Bound
from stasis.agent.node import Job, Node
from stasis.agent.pipes import Buffers, Copied, Held, Spilled, Stream
from stasis.agent.stream import Capture
from stasis.core.capacity import Mode
from stasis.core.connections import Connection
from stasis.errors import CheckpointFailed

MAX_SMALL = 256 << 20  # of one image that is neither pages nor a file's contents


class Small:
    """An image that is read here too: kept as bytes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.data = bytearray()

    @property
    def size(self) -> int:
        return len(self.data)

    def take(self, fd: int) -> None:
        with os.fdopen(fd, "rb", buffering=0) as pipe:
            while got := pipe.read(1 << 20):
                self.data += got
                if len(self.data) > MAX_SMALL:
                    raise CheckpointFailed(f"the image {self._name} of CRIU is larger than {MAX_SMALL >> 20} MiB")

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.data)

    def close(self) -> None:
        self.data = bytearray()


@dataclass
class Captured:
    """`areas` gives each area's tar stream, once. Pids are those inside the container."""

    images: dict[str, Stream]
    root: int
    last_pid: int
    hostname: str
    stdio: dict[str, int]
    connections: list[Connection]
    bound: list[Bound]
    areas: dict[str, Callable[[], Iterable[memoryview]]] = field(default_factory=dict)
    area_sizes: dict[str, AreaCapture] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(stream.size for stream in self.images.values())

    def close(self) -> None:
        for stream in (*self.images.values(), *self.copies):
            stream.close()
        self.images.clear()


def capture_tree(
    node: Node, criu: Criu, pid1: int, root: int, cgroup: int, job: Job, mode: Mode, buffers: Buffers, *, timeout: float
) -> Captured:
    """Capture the frozen tree below `root` (its pid inside the container); `cgroup`: its freezer's descriptor;
    `buffers`: for copies."""

    def make(name: str) -> Stream:
        if not name.startswith(("pages-", "ghost-file-")):
            return Small(name)
        if mode is Mode.HOLD:
            return Held()
        return Copied(buffers) if mode is Mode.COPY else Spilled(node.state)

    server, _ = criu.dump(pid1, root, cgroup, lambda folder: Capture(folder, make), timeout=timeout)
    streams = server.streams
    try:
        return _describe(node, pid1, root, job, streams, buffers)
    except BaseException:
        for stream in streams.values():
            stream.close()
        raise


def _describe(node: Node, pid1: int, root: int, job: Job, streams: dict[str, Stream], buffers: Buffers) -> Captured:
    def read(name: str) -> bytes:
        stream = streams.get(name)
        if not isinstance(stream, Small):
            raise CheckpointFailed(f"CRIU's dump has no image {name}")
        return bytes(stream.data)

    tree = node.codec.load("pstree.img", read("pstree.img")).messages
    pids = [pid for item in tree for pid in (item.pid, item.pgid, item.sid)]
    # Of a zombie CRIU writes a thread that it has never read.
    pids += [thread for item in tree for thread in item.threads if f"core-{thread}.img" in streams]
    captured = Captured(
        images=streams,
        root=root,
        last_pid=max(pids),
        hostname=names.hostname(pid1),
        stdio=_stdio(pid1),
        connections=images.connections(node.codec, read),
        bound=images.bound(node.codec, read),
    )
    processes = {lookup.inner_pids(pid)[-1]: pid for pid in proctree.walk(lookup.find_root(pid1).pid)}
    links = remaps.links(node.codec, streams, read, processes)
    for area in areas(pid1, job.volumes, host=node.host):
        reading = capture(area, links)
        captured.area_sizes[area.name] = reading
        if job.releases:
            captured.areas[area.name] = lambda reading=reading: reading  # type: ignore[misc]
        else:
            copy = Copied(buffers)
            copy.put(reading)
            captured.copies.append(copy)
            captured.areas[area.name] = copy.pieces
    return captured


def _stdio(pid1: int) -> dict[str, int]:
    """The pipes of init's that the runtime reads logs from: what a restored tree's ends are replaced by."""
    found: dict[str, int] = {}
    for fd in (1, 2):
        target = os.readlink(Path(f"/proc/{pid1}/fd/{fd}"))
        if target.startswith("pipe:"):
            found.setdefault(target, fd)
    return found
