"""Preflight of a running tree: what cannot be carried over a checkpoint, found before anything is frozen.

CRIU says so late, after the freeze, and often names neither process nor cause; what it loses it does not say at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from stasis.agent.lookup import Root
from stasis.agent.scan import files, ipc, memory, sockets, tasks, watches
from stasis.agent.scan.snapshot import read_tree
from stasis.errors import Finding

SHOWN = 3  # places of a process that a finding lists
PAUSE = 0.15  # seconds between two readings


def scan(pid1: int, root: Root, *, frozen: bool = False, gpus: bool = False) -> list[Finding]:
    """What a checkpoint of the tree below `root`, in the container of init `pid1`, cannot carry; empty: nothing.

    Processes, connections and unread data come and go, so a finding counts when every one of several readings has it;
    a tree without findings is read once, as is a frozen one. Nothing of the tree is touched. Raises ProcessLookupError
    when the root is gone. `gpus`: NVIDIA's devices are let pass, for their driver saves them.
    """
    start = time.monotonic()
    lasting = _read(pid1, root, frozen, gpus)
    more = not frozen  # at least a second reading, whatever was found
    while lasting and more:
        time.sleep(PAUSE)
        again = _read(pid1, root, frozen, gpus)
        lasting = {finding: settles for finding, settles in again.items() if finding in lasting}
        more = any(settles > time.monotonic() - start for settles in lasting.values())
    return _merged(lasting)


def _read(pid1: int, root: Root, frozen: bool, gpus: bool) -> dict[Finding, float]:
    """What one reading finds, each with the seconds after which it counts."""
    tree = replace(read_tree(pid1, root.pid), gpus=gpus)
    if tree.root.start != root.start:
        raise ProcessLookupError(f"process {root.pid} is another one than the one that was looked up")
    parts = [part.observe for part in (tasks, files, watches, sockets, memory, ipc)]
    if not frozen:
        parts.append(tasks.stuck)
    return {observation.finding: observation.settles for observe in parts for observation in observe(tree)}


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
