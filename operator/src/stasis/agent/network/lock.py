"""Hold back the TCP of a gang in one network namespace, and let it go again.

Dropped in OUTPUT, data stays unsent and can be pushed later; dropped only in INPUT it would count as sent. Priority
-400 comes before connection tracking and before the translation of addresses, so the lock sees the addresses that the
program uses. Probes, sidecars, UDP, peers outside the gang and other traffic over lo go on.

Imported by the guardian: the standard library and libnftables only.
"""

from __future__ import annotations

from collections.abc import Iterable

from stasis.agent.network import nft
from stasis.core.connections import FourTuple, IpAddress

TABLE = "stasis_lock"

# What CRIU puts on the packets by which it restores half-closed connections (SOCCR_MARK).
CRIU_MARK = 0xC114

UNLOCK = nft.replacing(f"inet {TABLE}")


def lock(where: int | nft.Nft, addresses: Iterable[IpAddress], connections: Iterable[FourTuple] = ()) -> None:
    """Drop all TCP from and to `addresses` (those of the gang, old and new), and that of single `connections`.

    `where`: a network namespace's descriptor, or a context that is open in it, for who has no time to lose.

    The namespace's own addresses may be among `addresses`: traffic over lo is held back by `connections` only. Those
    are, at a dump, the connections within the tree; at a restore also those to peers outside, which CRIU's refilled
    queues shall not reach. Done again it replaces the lock before, in one transaction. Raises StasisError.
    """
    nft.run(where, UNLOCK + _table(set(addresses), set(connections)))


def unlock(where: int | nft.Nft) -> None:
    """Remove the lock; nothing happens where there is none. Raises StasisError."""
    nft.run(where, UNLOCK)


def is_locked(netns_fd: int) -> bool:
    return f"table inet {TABLE}" in nft.run(netns_fd, "list tables inet").splitlines()


def _table(addresses: set[IpAddress], connections: set[FourTuple]) -> str:
    sets, inputs, outputs = [], [f"meta mark {CRIU_MARK} accept"], [f"meta mark {CRIU_MARK} accept"]
    for version, family in ((4, "ip"), (6, "ip6")):
        kind = f"ipv{version}_addr"
        tuples = [nft.four_tuple(c) for c in connections if c.local.version == version]
        sets.append(nft.set_(f"connections{version}", f"{kind} . inet_service . {kind} . inet_service", tuples))
        sets.append(nft.set_(f"gang{version}", kind, [str(a) for a in addresses if a.version == version]))
        source, destination = f"{family} saddr . tcp sport", f"{family} daddr . tcp dport"
        inputs.append(f"{destination} . {source} @connections{version} drop")
        outputs.append(f"{source} . {destination} @connections{version} drop")
        inputs.append(f'meta l4proto tcp iifname != "lo" {family} saddr @gang{version} drop')
        outputs.append(f'meta l4proto tcp oifname != "lo" {family} daddr @gang{version} drop')
    chains = [nft.chain(hook, "filter", hook, -400, rules) for hook, rules in (("input", inputs), ("output", outputs))]
    return nft.table(f"inet {TABLE}", *sets, *chains)
