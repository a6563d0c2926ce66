"""Let a restored rank keep its old address, and its peers theirs, in a pod that has another.

The processes hold addresses of the first pods. In the namespace the old address is added to lo, and two kinds of rules
stand between the program's view and the wire:

- the checkpointed connections, by exact 4-tuple, are rewritten without state on both sides (they began before any
  connection tracking of these pods);
- all else goes through connection tracking: old addresses of peers lead to the new ones, the old own address never
  leaves, and what listens on the old own address is reached by the new one. So new connections work by old address, by
  new address and by name. (Rewriting all traffic of a peer would break those by new address.)
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stasis.agent import namespaces
from stasis.agent.network import nft
from stasis.core.connections import FourTuple, IpAddress
from stasis.errors import RestoreFailed, Unsupported

TABLE = "stasis_translate"

_FAMILIES = {4: "ip", 6: "ip6"}
# By these marks what was added is found again: a label (IPv4) and a deprecated address (IPv6) on lo; a route's origin.
_LABEL = "lo:stasis"
_PROTOCOL = "145"
_RESERVED_PORTS = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
_ARP_IGNORE = Path("/proc/sys/net/ipv4/conf/all/arp_ignore")


@dataclass(frozen=True)
class Bound:
    """A socket that waits at an address for whoever comes."""

    protocol: str  # "tcp" or "udp"
    address: IpAddress
    port: int


def check(ranks: Mapping[int, Mapping[IpAddress, IpAddress]]) -> None:
    """Refuse a gang (by rank, new address by old) in which an old address is another rank's new one.

    The address would then mean one rank to the processes and another to the name service. Raises RestoreFailed.
    """
    for (a, mine), (b, theirs) in itertools.permutations(ranks.items(), 2):
        if taken := set(mine) & set(theirs.values()):
            raise RestoreFailed(
                f"{taken.pop()} is the address that the processes know rank {a} by, and the new one of rank {b}",
                remedy="give the pods addresses that no rank of the gang had before",
            )


def translate(
    netns_fd: int,
    own: Mapping[IpAddress, IpAddress],
    peers: Mapping[IpAddress, IpAddress],
    connections: Iterable[FourTuple],
    bound: Iterable[Bound],
) -> None:
    """Translate for the rank in this namespace; what an earlier call laid is replaced as a whole.

    `own` and `peers` map old addresses (the processes') to new ones (the pods'), IPv4 and IPv6, unchanged ones
    included. A rank may have several old ones: first that of its first pod, then those of later pods by which new
    connections were made (`connections.aliases_in_use`). `connections` are the checkpointed ones, as this rank names
    them, `bound` its listening sockets. To be called before the processes are restored. Raises StasisError.
    """
    untranslate(netns_fd)
    moved = {old: new for old, new in (*own.items(), *peers.items()) if old != new}
    if not moved:
        return
    gang = [c for c in connections if c.local in own and c.remote in peers and {c.local, c.remote} & set(moved)]
    _lay_addresses(netns_fd, own, peers)
    rules = "".join(_table(version, own, peers, gang, set(bound)) for version in _FAMILIES)
    nft.run(netns_fd, rules)
    namespaces.call(netns_fd, lambda: _guard({c.local_port for c in gang}))


def untranslate(netns_fd: int) -> None:
    """Remove what `translate` laid, if anything. Raises StasisError."""
    nft.run(netns_fd, "".join(nft.replacing(f"{family} {TABLE}") for family in _FAMILIES.values()))
    _ip(netns_fd, "-4", "route", "flush", "proto", _PROTOCOL)
    _ip(netns_fd, "-6", "route", "flush", "proto", _PROTOCOL)
    _ip(netns_fd, "-4", "address", "flush", "dev", "lo", "label", _LABEL)
    _ip(netns_fd, "-6", "address", "flush", "dev", "lo", "deprecated")


def _lay_addresses(netns_fd: int, own: Mapping[IpAddress, IpAddress], peers: Mapping[IpAddress, IpAddress]) -> None:
    lines = []
    for old, new in own.items():
        if old != new:
            mark = f"label {_LABEL}" if old.version == 4 else "nodad preferred_lft 0"
            lines.append(f"address replace {old}/{old.max_prefixlen} dev lo {mark}")
    first = {old.version: (old, new) for old, new in reversed(list(own.items()))}
    for old, new in first.values():
        interface = _interface(netns_fd, new)
        for peer, now in peers.items():
            if peer.version == old.version and peer != now:
                # The route is for the choice of the source address; the rewritten packet is routed again.
                lines.append(f"route replace {peer}/{peer.max_prefixlen} dev {interface} src {old} proto {_PROTOCOL}")
        if old != new:
            lines += _routes(netns_fd, old, interface)
    _ip(netns_fd, "-batch", "-", commands="\n".join(lines))


def _routes(netns_fd: int, old: IpAddress, interface: str) -> Iterator[str]:
    """Routes like those of the interface, which go before them and differ in their source alone: a program that looks
    up its own address, by where it would send from, finds the one that it knows."""
    version = f"-{old.version}"
    for route in json.loads(_ip(netns_fd, version, "-json", "route", "show", "dev", interface) or "[]"):
        to, metric = str(route["dst"]), int(route.get("metric", 0))
        if to.startswith(("fe80:", "ff")) or str(route.get("protocol")) == _PROTOCOL:
            continue
        via = f" via {route['gateway']}" if "gateway" in route else ""
        # IPv4 looks at the first of equal routes; IPv6 would take them for paths of one, but goes by the metric.
        verb, before = ("prepend", metric) if old.version == 4 else ("append", max(metric - 1, 1))
        yield f"route {verb} {to}{via} dev {interface} src {old} metric {before} proto {_PROTOCOL}"


def _table(
    version: int,
    own: Mapping[IpAddress, IpAddress],
    peers: Mapping[IpAddress, IpAddress],
    connections: Iterable[FourTuple],
    bound: Iterable[Bound],
) -> str:
    ip, kind = _FAMILIES[version], f"ipv{version}_addr"
    mine = {old: new for old, new in own.items() if old.version == version}
    theirs = {old: new for old, new in peers.items() if old.version == version}
    moved, peers_moved = ({o: n for o, n in places.items() if o != n} for places in (mine, theirs))
    seen = {n: o for o, n in reversed(list(peers_moved.items()))}  # of several old addresses the first
    new = mine | theirs
    # A packet that arrives is rewritten in two steps, its source first: each step looks up what it then looks like.
    tuples = [c for c in connections if c.local.version == version]
    remote = {c._replace(local=new[c.local], remote=new[c.remote]): c.remote for c in tuples}
    local = {c._replace(local=new[c.local]): c.local for c in tuples}
    waiting = {f"{b.protocol} . {mine[b.address]} . {b.port}": str(b.address) for b in bound if b.address in moved}
    four = f"{kind} . inet_service . {kind} . inet_service"
    leaving = f"{ip} saddr . tcp sport . {ip} daddr . tcp dport"
    coming = f"{ip} daddr . tcp dport . {ip} saddr . tcp sport"
    to_bound = f"dnat to meta l4proto . {ip} daddr . th dport map @bound"
    rewrite_out = f"notrack {ip} saddr set {ip} saddr map @new {ip} daddr set {ip} daddr map @new"
    return nft.replacing(f"{ip} {TABLE}") + nft.table(
        f"{ip} {TABLE}",
        nft.set_("connections", four, map(nft.four_tuple, tuples)),
        nft.map_("new", f"{kind} : {kind}", _texts(new)),
        nft.map_("remote", f"{four} : {kind}", {nft.four_tuple(c): str(a) for c, a in remote.items()}),
        nft.map_("local", f"{four} : {kind}", {nft.four_tuple(c): str(a) for c, a in local.items()}),
        nft.set_("own", kind, _texts(moved)),
        nft.map_("own_new", f"{kind} : {kind}", _texts(moved)),
        nft.map_("peer_new", f"{kind} : {kind}", _texts(peers_moved)),
        nft.map_("peer_old", f"{kind} : {kind}", _texts(seen)),
        nft.map_("bound", f"inet_proto . {kind} . inet_service : {kind}", waiting),
        nft.chain("rewrite_out", "route", "output", -300, [f"{leaving} @connections {rewrite_out}"]),
        nft.chain(
            "rewrite_in",
            "filter",
            "prerouting",
            -300,
            [
                f"{ip} saddr set {coming} map @remote notrack",
                f"{ip} daddr set {coming} map @local",
            ],
        ),
        nft.chain("track_out", "nat", "output", -100, [f"dnat to {ip} daddr map @peer_new", to_bound]),
        nft.chain("track_in", "nat", "prerouting", -100, [to_bound]),
        # Whoever is addressed by an old address sees the old one of the peer, too.
        nft.chain("track_seen", "nat", "input", 100, [f"{ip} daddr @own snat to {ip} saddr map @peer_old"]),
        nft.chain("track_leave", "nat", "postrouting", 100, [f'oifname != "lo" snat to {ip} saddr map @own_new']),
    )


def _texts(places: Mapping[IpAddress, IpAddress]) -> dict[str, str]:
    return {str(key): str(value) for key, value in places.items()}


def _guard(ports: set[int]) -> None:
    """Runs in the namespace. The connections' ports are kept from new ones, which would look the same on the wire; and
    the pod must not answer ARP for its old address, which another pod may own by now."""
    reserved = _RESERVED_PORTS.read_text().strip()
    listed = [reserved] if reserved else []
    _RESERVED_PORTS.write_text(",".join([*listed, *map(str, sorted(ports))]))
    if int(_ARP_IGNORE.read_text()) == 0:
        _ARP_IGNORE.write_text("1")


def _interface(netns_fd: int, address: IpAddress) -> str:
    """The name of the interface that has `address`."""
    for link in json.loads(_ip(netns_fd, "-json", "address", "show", "to", str(address)) or "[]"):
        if link.get("addr_info"):
            return str(link["ifname"])
    raise RestoreFailed(f"the pod has no interface with its new address {address}")


def _ip(netns_fd: int, *arguments: str, commands: str = "") -> str:
    """Run `ip` of this machine in the namespace."""
    # A child of the thread that entered the namespace is born there.
    try:
        done = namespaces.call(
            netns_fd, lambda: subprocess.run(["ip", *arguments], input=commands, capture_output=True, text=True)
        )
    except FileNotFoundError:
        raise Unsupported("`ip` is not installed", remedy="install iproute2") from None
    if done.returncode:
        raise RestoreFailed(f"ip {' '.join(arguments)}: {done.stderr.strip()[:2000]}")
    return done.stdout
