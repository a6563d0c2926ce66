"""What a reader tells of the images, as JSON: written by the reader, checked by the agent."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from stasis.agent.network.translate import Bound
from stasis.agent.reader.wire import Nonsense
from stasis.core.connections import address
from stasis.core.credentials import Credentials
from stasis.errors import Corrupt

MOST = 1_000_000  # images, threads, sockets, groups
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # CRIU's names; they name files where images are spilled


@dataclass(frozen=True)
class Described:
    """`images`: names. `tasks`: every thread that will run. `bound`: sockets that wait at an address of their own.
    `packed`: bytes of all packs."""

    images: tuple[str, ...]
    tasks: tuple[Credentials, ...]
    bound: tuple[Bound, ...]
    packed: int


def describe(
    names: Collection[str], tasks: Collection[Credentials], bound: Collection[Bound], packed: int
) -> dict[str, Any]:
    """Tasks share their chains of seccomp filters, which are long."""
    chains = list(dict.fromkeys(task.filters for task in tasks))
    at = {chain: number for number, chain in enumerate(chains)}
    return {
        "images": list(names),
        "chains": [[base64.b64encode(program).decode() for program in chain] for chain in chains],
        "tasks": [{**asdict(task), "filters": at[task.filters]} for task in tasks],
        "bound": [[one.protocol, str(one.address), one.port] for one in bound],
        "packed": packed,
    }


def described(answer: dict[str, Any]) -> Described:
    """Nonsense where it is no such answer, Corrupt where an image has a name that CRIU gives to none."""
    try:
        names = tuple(_listed(answer["images"]))
        chains = [tuple(base64.b64decode(p, validate=True) for p in _listed(c)) for c in _listed(answer["chains"])]
        tasks = tuple(_credentials(task, chains) for task in _listed(answer["tasks"]))
        bound = tuple(_bound(*one) for one in _listed(answer["bound"]))
        packed = _number(answer["packed"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Nonsense(f"no description of images: {error}") from None
    for name in names:
        if not isinstance(name, str) or not _IMAGE.fullmatch(name):
            raise Corrupt(f"{name!r:.200} is no name of an image of CRIU")
    return Described(names, tasks, bound, packed)


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST:
        raise TypeError("no list, or too long a one")
    return value


def _credentials(task: dict[str, Any], chains: Sequence[tuple[bytes, ...]]) -> Credentials:
    values = {**task, "filters": chains[task["filters"]]}
    for item in fields(Credentials):
        value, kind = values.get(item.name), item.type
        if kind == "tuple[int, ...]":
            values[item.name] = tuple(_number(one) for one in _listed(value))
        elif kind == "int":
            _number(value)
        elif kind != "tuple[bytes, ...]" and type(value).__name__ != kind:
            raise TypeError(f"{item.name} is no {kind}")
    return Credentials(**values)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise TypeError("no number")
    return value


def _bound(protocol: str, where: str, port: int) -> Bound:
    if protocol not in ("tcp", "udp") or not isinstance(where, str) or _number(port) > 0xFFFF:
        raise TypeError("no socket")
    return Bound(protocol, address(where), port)
