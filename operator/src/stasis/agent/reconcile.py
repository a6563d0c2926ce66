"""What a restarted agent does first: it finds the trees that its predecessor froze, and what was decided over them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stasis.agent import proctree
from stasis.agent.freezer import Freezer, GroupGone
from stasis.agent.guardian import Guardian
from stasis.agent.journal import BOOT_ID, Broken, Fate, FrozenTree, StateDir
from stasis.agent.records import Records
from stasis.core.records import Record, Verdict, decision_key, release_key
from stasis.errors import StasisError


class Standing(StrEnum):
    RUNS = "runs"  # thawed, or about to be by its guardian
    WAITS = "waits"  # voted, and frozen until a decision is recorded
    RELEASED = "released"  # Release is recorded; killed
    GONE = "gone"  # its processes have ended, or the machine was restarted
    BROKEN = "broken"  # the journal's entry, or a record, cannot be read


@dataclass(frozen=True)
class Found:
    """One entry of the journal. It stays there, with its fate, until `Guardian.stop`."""

    name: str
    standing: Standing
    tree: FrozenTree | None = None
    fate: Fate | None = None
    guardian: Guardian | None = None
    cause: str = ""


def kill(tree: FrozenTree) -> None:
    """Kill a released tree. Raises StasisError."""
    with Freezer(tree.cgroup, tree.freezer) as freezer:
        freezer.kill()


def reconcile(state: StateDir, release: Callable[[FrozenTree], None] = kill) -> list[Found]:
    """Take over the journal of an agent that ended: nobody else writes it any more.

    Its helpers are killed. A tree that it had not voted for is given up; one that it had voted for waits for its
    decision, or goes on with the one recorded, `release` being called for Release. Every tree that may be frozen has
    a living guardian afterwards. An entry that makes trouble is reported as BROKEN and never keeps the others.
    """
    for name in state.names("helper"):
        _end_helper(state, name)
    found = []
    for tree in state.trees():
        if isinstance(tree, Broken):
            found.append(Found(tree.name, Standing.BROKEN, cause=tree.cause))
            continue
        try:
            found.append(_take_over(state, tree, release))
        except StasisError as trouble:
            found.append(Found(tree.name, Standing.BROKEN, tree, cause=str(trouble)))
    return found


@contextlib.contextmanager
def helper(state: StateDir, pid: int) -> Iterator[None]:
    """Journal a process group (by its leader) that must not outlive the agent, CRIU and the like, while it runs."""
    state.write("helper", str(pid), {"pid": pid, "start": proctree.start_time(pid), "boot": _boot()})
    try:
        yield
    finally:
        state.remove("helper", str(pid))


def _end_helper(state: StateDir, name: str) -> None:
    try:
        helper = state.read("helper", name) or {}
        pid, start, boot = int(helper["pid"]), int(helper["start"]), helper["boot"]
        if boot == _boot() and start and proctree.start_time(pid) == start:
            os.killpg(pid, signal.SIGKILL)
    except (StasisError, KeyError, ValueError, ProcessLookupError):
        pass  # broken: a CRIU that still traces a tree is ended by the tree's guardian
    state.remove("helper", name)


def _take_over(state: StateDir, tree: FrozenTree, release: Callable[[FrozenTree], None]) -> Found:
    fate = state.fate(tree.name) or state.claim(tree.name, Fate.FIRED)
    guardian = Guardian(state, tree)
    if tree.boot != _boot() or _gone(tree):
        return Found(tree.name, Standing.GONE, tree, fate, guardian)
    guardian.ensure()
    record = _decided(tree) if fate is Fate.VOTED else None
    if record and record.verdict is Verdict.RELEASE:
        release(tree)
        standing = Standing.RELEASED
    elif record or fate is Fate.FIRED:
        standing = Standing.RUNS
    else:
        standing = Standing.WAITS
    return Found(tree.name, standing, tree, fate, guardian)


def _decided(tree: FrozenTree) -> Record | None:
    """Abort, Release or Continue; None where nothing is recorded that ends the freeze."""
    records = Records(Path(tree.records))
    try:
        for key in (decision_key(tree.op), release_key(tree.op)):
            record = records.read(key)
            if record and record.verdict in (Verdict.ABORT, Verdict.CONTINUE, Verdict.RELEASE):
                return record
    finally:
        records.close()
    return None


def _gone(tree: FrozenTree) -> bool:
    if proctree.start_time(tree.root) == tree.root_start and not proctree.dead(tree.root):
        return False
    try:
        with Freezer(tree.cgroup, tree.freezer) as freezer:
            return not freezer.pids()
    except GroupGone:
        return True


def _boot() -> str:
    return BOOT_ID.read_text().strip()
