"""What all ranks on a node share: the bundled CRIU, its image codec, and where state is kept."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stasis.agent import provision
from stasis.agent.criu import Criu, Journal
from stasis.agent.criu_images import ImageCodec
from stasis.agent.cuda.hardware import Hardware
from stasis.agent.files.worker import Worker
from stasis.agent.reader.client import Reader
from stasis.agent.reader.process import Process
from stasis.agent.reserve import Ledger
from stasis.core.connections import IpAddress, address
from stasis.errors import UsageError

AREAS = 2  # that most containers have: what was written to their layer, and /dev/shm


@dataclass
class Node:
    """`state` is a folder of this machine that outlives the agent; `host`: where its root file system is seen."""

    state: Path
    bundle: Path = field(default_factory=provision.criu)
    host: str = "/"
    journal: Journal = contextlib.nullcontext  # of processes that must not outlive the agent
    _idle: list[Process] = field(default_factory=list)
    _workers: list[Worker] = field(default_factory=list)

    @cached_property
    def codec(self) -> ImageCodec:
        return ImageCodec(self.bundle / "images.desc")

    @cached_property
    def hardware(self) -> Hardware:
        return Hardware(self.journal)

    @cached_property
    def ledger(self) -> Ledger:
        """Of this machine, whatever gang."""
        return Ledger(Path(os.environ.get("STASIS_STATE") or "/var/lib/stasis") / "reservations")

    def __post_init__(self) -> None:
        """Pages that are held by reference take a descriptor for each MiB."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def warm(self, count: int) -> None:
        """So many restores are about to begin: have the processes ready that read the checkpoints and lay the files."""
        self._idle = [process for process in self._idle if process.alive]
        while len(self._idle) < count:
            self._idle.append(Process())
        while len(self._workers) < AREAS * count:
            self._workers.append(Worker())

    def worker(self) -> Worker:
        """To lay one area's files; the caller closes it."""
        with contextlib.suppress(IndexError):
            while True:
                worker = self._workers.pop()
                if worker.alive:
                    return worker
                worker.close()
        return Worker()

    def reader(self, repository: str, manifest: str) -> Reader:
        """Of a rank's checkpoint."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = Process()
        return Reader(self.bundle, repository, manifest, process=process)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        while self._workers:
            self._workers.pop().close()
        self.hardware.close()

    def criu(self) -> Criu:
        return Criu(self.bundle, journal=self.journal)


@dataclass(frozen=True)
class Pod:
    """The pod of a rank. `id` names it towards its own preStop."""

    namespace: str
    name: str
    uid: str
    id: str = ""


@dataclass(frozen=True)
class Job:
    """What a rank's agent is told about the gang, with the first step. JSON as it travels: `Job(**args)`.

    `addresses`: rank (as text) -> its addresses: that of its first pod, by which the processes know it, those of later
    pods that are still in use, and at last the one that it has now.
    """

    container_id: str
    rank: int
    world_size: int
    repository: str  # reference of the repository, without a tag
    addresses: dict[str, tuple[str, ...]]
    volumes: tuple[str, ...] = ()  # mount points that a checkpoint carries (emptyDirs)
    releases: bool = True  # the tree will be released: pages are held by reference, not copied
    parent: str = ""  # digest of the rank's manifest to deduplicate against
    manifest: str = ""  # of a restore: the digest of the rank's manifest
    uid: str = ""
    checkpoint: str = ""  # of a restore: its operation
    local: bool = False  # the gang commits when this node's disk has its part: it goes to the repository afterwards
    pod: Pod | None = None  # in a cluster

    def old(self, rank: str) -> dict[IpAddress, IpAddress]:
        """Old addresses of a rank, each with the one that it has now."""
        *before, now = (address(text) for text in self.addresses[rank])
        return dict.fromkeys(before, now) | {now: now}

    def gang(self) -> set[IpAddress]:
        """All addresses of all ranks."""
        return {address(text) for known in self.addresses.values() for text in known}

    @classmethod
    def from_args(cls, args: Any) -> Job:
        try:
            addresses = {rank: tuple(known) for rank, known in args["addresses"].items()}
            if not all(addresses.values()):
                raise ValueError("a rank without an address")
            pod = Pod(**args["pod"]) if args.get("pod") else None
            return cls(**{**args, "addresses": addresses, "volumes": tuple(args.get("volumes", ())), "pod": pod})
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"the first step's arguments do not describe a job: {error}") from None
