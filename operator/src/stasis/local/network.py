"""A network for containers on one machine: a bridge in a namespace of its own, a namespace per rank.

Nothing is added to the host's own namespace, and everything vanishes with the namespaces.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stasis.agent import namespaces
from stasis.errors import Unsupported

T = TypeVar("T")


def _ip(*arguments: str, netns: str = "", check: bool = True) -> None:
    command = ["ip", *(["-n", netns] if netns else []), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise Unsupported(f"`{' '.join(command)}` failed: {done.stderr.strip()}", remedy="see `stasis doctor`")


def inside(netns: Path, work: Callable[[], T]) -> T:
    """Run `work` in another network namespace; sockets it makes belong there for good."""
    namespace = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return namespaces.call(namespace, work)
    finally:
        os.close(namespace)


class Network:
    """A bridge with the address `10.77.0.1`; `attach` gives namespaces addresses of 10.77.0.0/16 and fd77::/64."""

    GATEWAY = "10.77.0.1"

    def __init__(self, name: str) -> None:
        self.name = name
        self._attached: set[str] = set()

    @property
    def netns(self) -> Path:
        """The bridge's namespace: servers of the world outside the gang live there."""
        return Path("/run/netns", self.name)

    def up(self) -> None:
        self.down()
        _ip("netns", "add", self.name)
        _ip("link", "set", "lo", "up", netns=self.name)
        _ip("link", "add", "br0", "type", "bridge", netns=self.name)
        _ip("addr", "add", f"{self.GATEWAY}/16", "dev", "br0", netns=self.name)
        _ip("-6", "addr", "add", "fd77::1/64", "dev", "br0", "nodad", netns=self.name)
        _ip("link", "set", "br0", "up", netns=self.name)

    def attach(self, port: str, address: str) -> Path:
        """A fresh namespace `<network>-<port>` with `eth0` at `address`; one that is there is replaced."""
        netns = f"{self.name}-{port}"
        self.detach(port)
        _ip("netns", "add", netns)
        self._attached.add(port)
        _ip("link", "add", f"p{port}", "type", "veth", "peer", "name", "eth0", "netns", netns, netns=self.name)
        _ip("link", "set", f"p{port}", "master", "br0", "up", netns=self.name)
        _ip("link", "set", "lo", "up", netns=netns)
        _ip("addr", "add", f"{address}/16", "dev", "eth0", netns=netns)
        last = address.rsplit(".", 2)[1:]
        _ip("-6", "addr", "add", f"fd77::{last[0]}:{last[1]}/64", "dev", "eth0", "nodad", netns=netns)
        _ip("link", "set", "eth0", "up", netns=netns)
        _ip("route", "add", "default", "via", self.GATEWAY, netns=netns)
        return Path("/run/netns", netns)

    def detach(self, port: str) -> None:
        _ip("netns", "del", f"{self.name}-{port}", check=False)
        _ip("link", "del", f"p{port}", netns=self.name, check=False)
        self._attached.discard(port)

    def down(self) -> None:
        """Remove the bridge and every namespace of this network, also what a killed run left."""
        for path in Path("/run/netns").glob(f"{self.name}*"):
            if path.name == self.name or path.name.startswith(f"{self.name}-"):
                _ip("netns", "del", path.name, check=False)
        self._attached.clear()
