"""Sockets that cannot be carried: of unknown families, with something half done, connected to another container.

Told from the kernel's socket tables, which disturbs nothing. A socket in none of them is of a rare family or not yet
connected: a copy of its descriptor says what it is.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
from collections.abc import Iterator

from stasis.agent import proctree
from stasis.agent.lookup import neighbours
from stasis.agent.scan import diag
from stasis.agent.scan.borrow import borrowed
from stasis.agent.scan.observation import SOON, Observation
from stasis.agent.scan.snapshot import Descriptor, Process, Tree, read_descriptors
from stasis.core import carriable

Owners = dict[int, tuple[Process, Descriptor]]
_ACCEPT_REMEDY = "let the program accept what waits (it may be busy now: try again), or close its listening socket"
_OWN_ONLY = "connect the job only to processes of its own, or over the network to another address"
_MPTCP = 262


def observe(tree: Tree) -> Iterator[Observation]:
    owners: Owners = {}
    for process, descriptor in tree.descriptors():
        if inode := descriptor.inode_of("socket"):
            owners.setdefault(inode, (process, descriptor))
    if not owners:
        return
    tables = diag.read(tree.pid1)
    for inode in owners.keys() - tables.known:
        yield from _rare(*owners[inode])
    yield from _unix(tree, owners, tables.unix)
    yield from _tcp(tree, owners, tables.tcp)
    for inode, unread in tables.netlink_unread.items():
        if unread and inode in owners:
            process, descriptor = owners[inode]
            yield Observation.of(
                process,
                descriptor.where,
                "a netlink socket holds data that the program has not read",
                "read the answer to its end (NLMSG_DONE), or close the socket after use",
                settles=SOON,
            )


def _rare(process: Process, descriptor: Descriptor) -> Iterator[Observation]:
    with contextlib.suppress(OSError), borrowed(descriptor) as fd:
        with contextlib.closing(sockets.socket(fileno=os.dup(fd))) as copy:
            options = (sockets.SO_DOMAIN, sockets.SO_TYPE, sockets.SO_PROTOCOL)
            family, kind, protocol = (copy.getsockopt(sockets.SOL_SOCKET, option) for option in options)
        if refusal := carriable.socket(family, kind, protocol):
            yield Observation.refused(process, descriptor.where, refusal)


def _unix(tree: Tree, owners: Owners, table: dict[int, diag.UnixSocket]) -> Iterator[Observation]:
    awaited = {waiting: listening.inode for listening in table.values() for waiting in listening.waiting if waiting}
    for inode, (process, descriptor) in owners.items():
        one = table.get(inode)
        if one is None:
            continue
        where = descriptor.where + (f" {one.name}" if one.name else "")
        other = one.peer or awaited.get(inode, 0)
        if other and other not in owners:
            far = table.get(other)
            path = one.name or (far.name if far else "")
            name = f" at {path}" if path else ""
            yield Observation.of(
                process,
                where,
                f"a UNIX socket{name} connects it with {_owner(tree, other)} outside the job's tree",
                _OWN_ONLY,
                settles=SOON,
            )
        elif inode in awaited and one.unsent:
            yield Observation.of(
                process,
                where,
                "it has sent data over a UNIX socket whose connection is not accepted yet",
                _ACCEPT_REMEDY,
                settles=SOON,
            )
        if strangers := [waiting for waiting in one.waiting if waiting not in owners]:
            what = "have been closed already" if 0 in strangers else "come from outside the job's tree"
            yield Observation.of(
                process,
                where,
                f"connections that wait to be accepted at this UNIX socket {what}",
                _ACCEPT_REMEDY,
                settles=SOON,
            )


def _tcp(tree: Tree, owners: Owners, table: list[diag.TcpSocket]) -> Iterator[Observation]:
    by_ends = {(one.local, one.remote): one for one in table if one.state != diag.LISTEN}
    for one in table:
        if one.inode not in owners:
            continue
        process, descriptor = owners[one.inode]
        where = f"{descriptor.where} {_text(one.local)}"
        if one.backlog:
            yield Observation.of(
                process,
                where,
                "connections wait to be accepted at this TCP socket",
                _ACCEPT_REMEDY,
                settles=SOON,
            )
        if one.ulp == "mptcp":  # the table shows its subflows
            if refusal := carriable.socket(sockets.AF_INET, sockets.SOCK_STREAM, _MPTCP):
                yield Observation.refused(process, descriptor.where, refusal)
        elif one.ulp:
            yield Observation.of(
                process,
                where,
                f"a TCP connection has the kernel's {one.ulp} in it, which a checkpoint would lose",
                "let the program do this itself (kernel TLS off)",
            )
        other = by_ends.get((one.remote, one.local))
        if one.state != diag.LISTEN and other and other.inode and other.inode not in owners:
            yield Observation.of(
                process,
                f"{where} - {_text(one.remote)}",
                f"a TCP connection within the pod connects it with {_owner(tree, other.inode)} outside the job's tree",
                _OWN_ONLY,
                settles=SOON,
            )


def _owner(tree: Tree, inode: int) -> str:
    for pid in neighbours(tree.pid1, tree.pids):
        if any(descriptor.inode_of("socket") == inode for descriptor in read_descriptors(pid)):
            return f"process {pid} ({proctree.read(pid, pid, 'comm')})"
    return "a process"


def _text(address: diag.Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
