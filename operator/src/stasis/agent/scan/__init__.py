"""Preflight of a running tree: what cannot be carried over a checkpoint, found before anything is frozen.

CRIU says so late, after the freeze, and often names neither process nor cause; what it loses it does not say at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from stasis.agent.lookup import Root
from stasis.agent.scan import files, ipc, memory, sockets, tasks, watches
from stasis.agent.scan.observation import Observation
from stasis.agent.scan.snapshot import read_tree
from stasis.errors import Finding

READINGS = 5  # of what may settle; two suffice for all else
SHOWN = 3  # places of a process that a finding lists
PAUSE = 0.15  # seconds between two readings


def scan(pid1: int, root: Root, *, readings: int = READINGS) -> list[Finding]:
    """What a checkpoint of the tree below `root`, in the container of init `pid1`, cannot carry; empty: nothing.

    A finding counts when every one of several readings has it, since processes, connections and unread data come and
    go; a tree at rest is read once, a frozen one with `readings=1`. Nothing of the tree is touched. Raises
    ProcessLookupError when the root is gone.
    """
    lasting: dict[Finding, Observation] = {}
    for reading in range(readings):
        if reading:
            time.sleep(PAUSE)
        seen = {observation.finding: observation for observation in _read(pid1, root)}
        lasting = {finding: observation for finding, observation in seen.items() if not reading or finding in lasting}
        if not lasting or (reading and not any(observation.settles for observation in lasting.values())):
            break
    return _merged(lasting)


def _read(pid1: int, root: Root) -> Iterator[Observation]:
    tree = read_tree(pid1, root.pid)
    if tree.root.start != root.start:
        raise ProcessLookupError(f"process {root.pid} is another one than the one that was looked up")
    for part in (tasks, files, watches, sockets, memory, ipc):
        yield from part.observe(tree)


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for all descriptors of a process with one cause, and one for what many processes inherited."""
    places: dict[tuple[int, str], list[Finding]] = {}
    for finding in findings:
        places.setdefault((finding.pid, finding.cause), []).append(finding)
    heirs: dict[tuple[str, str, int], list[Finding]] = {}
    for group in places.values():
        where = ", ".join(finding.where for finding in group[:SHOWN])
        where += f" and {len(group) - SHOWN} more" if len(group) > SHOWN else ""
        first = replace(group[0], where=where)
        heirs.setdefault((first.cause, where, 0 if where else first.pid), []).append(first)
    return [
        replace(first, where=f"{first.where} (and in {len(more)} more processes)") if more else first
        for first, *more in heirs.values()
    ]
