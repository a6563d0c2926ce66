"""What a checkpoint says about one rank beside its streams: the config of the rank's manifest.

Another party's bytes when they are read: every field is checked for its type and bounded before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from stasis.core.connections import Connection, FourTuple, address
from stasis.errors import Corrupt, Unsupported

VERSION = 1
MAX_ITEMS = 1_000_000
MAX_HOSTNAME = 64  # uname(2)
_PIPE = re.compile(r"pipe:\[[0-9]{1,20}\]")

AREA_PREFIX = "files/"  # the stream of an area of files: `files/upper`, `files/shm`, `files/emptydir:/data`
IMAGE_PREFIX = "criu/"  # the stream of an image of CRIU: `criu/pstree.img`
INIT_STREAM = "init"  # the build of init that the tree is under: it maps that file
INIT_BYTES = 16 << 20  # more is no init


@dataclass(frozen=True)
class RankConfig:
    """All that a restore needs and the streams do not hold. Pids are those inside the container."""

    uid: str  # of the checkpoint
    rank: int
    world_size: int
    root: int  # pid of the keeper
    threads: int  # of all processes together
    last_pid: int  # highest pid of the tree: CRIU's helpers must get higher ones
    hostname: str
    init: str  # the keeper's program in the container; the name of its folder says which build
    addresses: Mapping[str, Any] = field(default_factory=dict)  # rank (as text) -> those by which processes know it
    stdio: Mapping[str, int] = field(default_factory=dict)  # resource (`pipe:[123]`) -> descriptor of init
    areas: Mapping[str, int] = field(default_factory=dict)  # area of files -> bytes of its files
    stopped: tuple[int, ...] = ()  # tasks that a signal had stopped: they stay so
    attributes: tuple[Mapping[str, Any], ...] = ()  # what CRIU does not carry, by task
    cgroups: tuple[Mapping[str, Any], ...] = ()  # groups of the tree's own, and who was in them
    connections: tuple[Mapping[str, Any], ...] = ()  # `Connection.as_dict`
    fixes: Mapping[str, Any] = field(default_factory=dict)  # inode of a socket -> `Fix`, so that both its ends agree
    outside: tuple[Any, ...] = ()  # [local, port, remote, port] of connections that lead out of the gang
    options: Mapping[str, Any] = field(default_factory=dict)  # `pid/fd` of a socket -> options that CRIU does not carry
    open_on_volumes: tuple[Mapping[str, Any], ...] = ()  # files on volumes that are not carried
    huge_pages: Mapping[str, int] = field(default_factory=dict)  # size of a page in bytes -> pages in use
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds, by step
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes
    devices: Mapping[str, Any] = field(default_factory=dict)  # GPUs and who had them; empty: none

    def table(self) -> list[Connection]:
        try:
            return [Connection.from_dict(item) for item in self.connections]
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"the config of rank {self.rank} holds a connection that is none: {error}") from None

    def leaving(self) -> list[FourTuple]:
        """The connections to others than gang members: closed at the restore."""
        try:
            return [FourTuple(address(a), int(p), address(b), int(q)) for a, p, b, q in self.outside]
        except (TypeError, ValueError) as error:
            raise Corrupt(f"the config of rank {self.rank} holds a connection that is none: {error}") from None

    def known(self) -> dict[int, tuple[str, ...]]:
        """By which addresses the processes know each rank; the first one is its first pod's."""
        try:
            return {int(rank): tuple(str(address(text)) for text in known) for rank, known in self.addresses.items()}
        except (TypeError, ValueError) as error:
            raise Corrupt(f"the config of rank {self.rank} holds an address that is none: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankConfig:
        """Raises Corrupt where a field is missing or not what it should be, Unsupported for another version."""
        version = data.get("version")
        if version != VERSION:
            raise Unsupported(f"a rank's config of version {version}, this Stasis reads version {VERSION}")
        known = {item.name: item for item in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name not in known:
                continue  # a later version's addition
            values[name] = _checked(name, str(known[name].type), value)
        for resource, fd in values.get("stdio", {}).items():
            if not _PIPE.fullmatch(resource) or fd not in (1, 2):
                raise Corrupt(f"a rank's config gives descriptor {fd} of init for {resource!r:.100}")
        if len(values.get("hostname", "").encode()) > MAX_HOSTNAME:
            raise Corrupt(f"a rank's config has a host name of more than {MAX_HOSTNAME} bytes")
        try:
            return cls(**values)
        except TypeError as error:
            raise Corrupt(f"a rank's config lacks a field: {error}") from None


def _checked(name: str, kind: str, value: Any) -> Any:
    if kind == "int":
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
    elif kind == "str":
        good = isinstance(value, str) and len(value) <= 4096
    elif kind.startswith("tuple["):
        good = isinstance(value, list) and len(value) <= MAX_ITEMS and all(_item(kind, item) for item in value)
        value = tuple(value) if good else value
    else:
        good = isinstance(value, dict) and len(value) <= MAX_ITEMS and all(_item(kind, item) for item in value.values())
    if not good:
        raise Corrupt(f"a rank's config has a field {name} that is no {kind}")
    return value


def _item(kind: str, item: Any) -> bool:
    if "Mapping[str, Any], ..." in kind:
        return isinstance(item, dict)
    if "float" in kind:
        return isinstance(item, int | float)
    if "str, int]" in kind or "tuple[int" in kind:
        return isinstance(item, int) and not isinstance(item, bool)
    return "Any" in kind or isinstance(item, str)
