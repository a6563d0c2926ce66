"""Mappings that cannot be carried: devices, kernel objects, memory shared with processes outside the tree."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from stasis.agent import proctree
from stasis.agent.lookup import neighbours
from stasis.agent.scan.observation import SOON, Observation
from stasis.agent.scan.snapshot import Mapping, Process, Tree, read_mappings
from stasis.core import carriable


def observe(tree: Tree) -> Iterator[Observation]:
    regular: set[tuple[str, int, str]] = set()  # most mappings are of the same few libraries: each looked at once
    for process in tree.living:
        seen: set[str] = set()
        for mapping in process.mappings:
            key = (*mapping.file, mapping.path)
            if key in regular or mapping.path in seen or tree.saved(mapping.path):
                continue
            if refusal := carriable.mapping(mapping.path):
                seen.add(mapping.path)
                yield Observation.refused(process, mapping.where, refusal)
            elif refused := _device(process, mapping):
                seen.add(mapping.path)
                yield refused
            else:
                regular.add(key)
    yield from _shared_outside(tree)


def _device(process: Process, mapping: Mapping) -> Observation | None:
    if mapping.path.startswith("["):
        return None
    start, _, end = mapping.range.partition("-")
    try:  # by the link in map_files: the path may name another file by now, or one of another mount namespace
        status = os.stat(f"/proc/{process.pid}/map_files/{int(start, 16):x}-{int(end, 16):x}")
    except OSError:
        return None
    block = stat.S_ISBLK(status.st_mode)
    if not block and not stat.S_ISCHR(status.st_mode):
        return None
    numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
    refusal = carriable.device(mapping.path, block, *numbers, mapped=True)
    return Observation.refused(process, mapping.where, refusal) if refusal else None


def _shared_outside(tree: Tree) -> Iterator[Observation]:
    """Writable memory that another container of the pod has mapped too: after the restore the two would drift apart."""
    ours: dict[tuple[str, int], tuple[Process, Mapping]] = {}
    for process in tree.living:
        for mapping in process.mappings:
            if mapping.shared and mapping.writable:
                ours.setdefault(mapping.file, (process, mapping))
    if not ours:
        return
    for pid in neighbours(tree.pid1, tree.pids):
        for other in read_mappings(pid):
            if other.shared and (pair := ours.pop(other.file, None)):
                process, mapping = pair
                yield Observation.of(
                    process,
                    mapping.where,
                    f"this memory is shared with process {pid} ({proctree.read(pid, pid, 'comm')}) outside the job's "
                    "tree, which is not checkpointed",
                    "share memory only between processes of the job's own container",
                    settles=SOON,
                )
