"""What all ranks on a node share: the bundled CRIU, its image codec, buffers, and where state is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stasis.agent import provision
from stasis.agent.criu import Criu
from stasis.agent.criu_images import ImageCodec
from stasis.agent.pipes import Buffers
from stasis.errors import UsageError


@dataclass
class Node:
    """`state` is a folder of this machine that outlives the agent."""

    state: Path
    bundle: Path = field(default_factory=provision.criu)
    buffers: Buffers = field(default_factory=Buffers)

    @cached_property
    def codec(self) -> ImageCodec:
        return ImageCodec(self.bundle / "images.desc")

    def criu(self) -> Criu:
        return Criu(self.bundle)


@dataclass(frozen=True)
class Job:
    """What a rank's agent is told about the gang, with the first step. JSON as it travels: `Job(**args)`.

    `addresses`: rank (as text) -> by what address the processes know it, and where it is now.
    """

    container_id: str
    rank: int
    world_size: int
    repository: str  # reference of the repository, without a tag
    addresses: dict[str, tuple[str, str]]
    volumes: tuple[str, ...] = ()  # mount points that a checkpoint carries (emptyDirs)
    releases: bool = True  # the tree will be released: pages are held by reference, not copied
    parent: str = ""  # digest of the rank's manifest to deduplicate against
    manifest: str = ""  # of a restore: the digest of the rank's manifest
    uid: str = ""
    checkpoint: str = ""  # of a restore: its operation

    @classmethod
    def from_args(cls, args: Any) -> Job:
        try:
            addresses = {rank: (first, now) for rank, (first, now) in args["addresses"].items()}
            return cls(**{**args, "addresses": addresses, "volumes": tuple(args.get("volumes", ()))})
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"the first step's arguments do not describe a job: {error}") from None
