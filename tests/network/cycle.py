"""The steps of a checkpoint and a restore as the agent takes them, for the load program's gang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.network.lab import Gang, Pod

from stasis.agent.criu_images import ImageCodec
from stasis.agent.network import diag, images, lock, options, translate
from stasis.agent.network.release import Gate
from stasis.agent.network.sockets import TcpSockets, drain
from stasis.core.connections import Connection, FourTuple, IpAddress, Mended, address, aliases_in_use, mend


@dataclass
class Captured:
    folders: list[Path]
    connections: dict[int, list[Connection]]
    mended: Mended
    options: list[options.Options]
    in_flight: int  # when locked


def gang_addresses(gang: Gang) -> set[IpAddress]:
    return {address(a) for a in (*gang.addresses, *gang.moved, *map(str, gang.aliases))}


@contextlib.contextmanager
def quiet(
    gang: Gang, *, drained: bool = True, locked: bool = True, thaw: bool = True
) -> Iterator[tuple[int, list[options.Options]]]:
    """The gang frozen, drained and locked; then unlocked, and thawed or its pods deleted.

    Gives what was in flight when locked, and the options of the sockets.
    """
    addresses = gang_addresses(gang)
    for pod in gang.pods:
        pod.set_frozen(True)
    with contextlib.ExitStack() as held:
        ranks = [held.enter_context(TcpSockets(pod.tasks())) for pod in gang.pods]
        saved = [options.read(r) for r in ranks]
        for r in ranks:
            options.hold(r)
        left = 1
        for _ in range(3):
            if drained:
                assert all(drain(r.connected(addresses), 5) == 0 for r in ranks)
            if locked:
                for pod, r in zip(gang.pods, ranks, strict=True):
                    lock.lock(pod.netns_fd, addresses, r.within(addresses))
            left = sum(s.in_flight for r in ranks for s in r.connected(addresses))
            if not (drained and locked and left):
                break
            for pod in gang.pods:
                lock.unlock(pod.netns_fd)
        for pod, r in zip(gang.pods, ranks, strict=True):
            if drained:
                assert not diag.unsettled(pod.netns_fd, addresses, r.listening())
        yield left, saved
        for pod in gang.pods:
            lock.unlock(pod.netns_fd)
        for r, o in zip(ranks, saved, strict=True):
            options.write(r, o)
    for pod in gang.pods:
        if thaw:
            pod.set_frozen(False)
        else:
            pod.close()


def capture(gang: Gang, codec: ImageCodec, name: str, *, drained: bool = True, locked: bool = True, pause: float = 0.0):
    """Dump all ranks, then delete their pods."""
    folders = [gang.folder / f"{name}.{rank}" for rank in range(len(gang.pods))]
    with quiet(gang, drained=drained, locked=locked, thaw=False) as (in_flight, saved):
        for pod, folder in zip(gang.pods, folders, strict=True):
            pod.dump(folder, "--skip-in-flight")
            time.sleep(pause)
        tables = {
            rank: images.connections(codec, lambda n, f=folder: (f / n).read_bytes())
            for rank, folder in enumerate(folders)
        }
    aliases = gang.aliases | {address(new): address(old) for old, new in zip(gang.addresses, gang.moved, strict=False)}
    mended = mend(tables, gang_addresses(gang), aliases) if locked else Mended({}, {})
    bound = [b.address for folder in folders for b in images.bound(codec, lambda n, f=folder: (f / n).read_bytes())]
    gang.aliases = aliases_in_use(tables.values(), bound, aliases)
    for rank, fixes in mended.fixes.items():
        for inode, fix in fixes.items():
            image = folders[rank] / images.queues(inode)
            image.write_bytes(images.apply(codec, image.read_bytes(), fix))
    return Captured(folders, tables, mended, saved, in_flight)


def resume(
    gang: Gang, captured: Captured, moved: Sequence[str] = (), *, locked: bool = True, codec: ImageCodec | None = None
) -> int:
    """Restore into fresh pods, release the connections, let the ranks run. The time of the release in ns.

    The pods have the gang's addresses, or those of `moved`: then the gang's are translated.
    """
    gang.moved[:] = moved
    gang.pods[:] = [Pod(gang.switch, [a.removeprefix("::ffff:")]) for a in moved or gang.addresses]
    everywhere = gang_addresses(gang)
    places = {address(old): address(new) for old, new in zip(gang.addresses, moved or gang.addresses, strict=True)}
    places |= {alias: places[first] for alias, first in gang.aliases.items()}
    ranks = {
        r: {a: new for a, new in places.items() if gang.aliases.get(a, a) == address(old)}
        for r, old in enumerate(gang.addresses)
    }
    translate.check(ranks)
    for rank, pod in enumerate(gang.pods):
        if codec:
            peers = {old: new for old, new in places.items() if old not in ranks[rank]}
            bound = images.bound(codec, lambda n, r=rank: (captured.folders[r] / n).read_bytes())
            tuples = [c.ends for c in captured.connections[rank]]
            translate.translate(pod.netns_fd, ranks[rank], peers, tuples, bound)
        if locked:
            lock.lock(pod.netns_fd, everywhere, local_and_outside(captured, rank))
    for pod, folder in zip(gang.pods, captured.folders, strict=True):
        pod.restore(folder)
    return release(gang, captured)


def local_and_outside(captured: Captured, rank: int) -> list[FourTuple]:
    table = captured.connections[rank]
    own = {c.ends.local for c in table}
    return [c.ends for c in table if c.ends.remote in own] + captured.mended.outside.get(rank, [])


def release(gang: Gang, captured: Captured) -> int:
    """The three steps; the time of the first in ns."""
    with contextlib.ExitStack() as opened:
        gates = [opened.enter_context(Gate(pod.tasks(), pod.netns_fd)) for pod in gang.pods]
        start = gang.next_epoch()
        for gate in gates:
            gate.unlock()
        for rank, (pod, gate) in enumerate(zip(gang.pods, gates, strict=True)):
            diag.destroy(pod.netns_fd, captured.mended.outside.get(rank, []))
            options.write(gate.sockets, captured.options[rank])
        for gate in gates:
            gate.poke()
        for pod in gang.pods:
            pod.go()
    return start
