"""What checkpoints of durability Local have put on this node's disk, until their registry has it (rule 30).

One layout folder for each repository, so that what its checkpoints have in common is there once. Who made them, and
where they are to go, is in the journal: an agent that comes later goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stasis.agent.journal import StateDir
from stasis.agent.node import Job
from stasis.errors import Corrupt, NotFound, Unavailable
from stasis.store.checkpoint import copy_ranks, forget
from stasis.store.connect import open_repository
from stasis.store.credentials import Credentials
from stasis.store.media import MANIFEST, RANK_ARTIFACT, Descriptor
from stasis.store.reader import RankReader
from stasis.store.repository import Repository

KEPT = "kept"  # kind of the entries that name a rank's manifest in a folder here
FOLDER = "kept"  # in the agent's own


@dataclass(frozen=True)
class Kept:
    """One rank's part of a checkpoint. `repository`: the one that it is to go to; `at`: seconds of the wall clock."""

    op: str
    rank: int
    repository: str
    digest: str
    at: float


def prepare(state: StateDir) -> None:
    """Before anything is kept: nobody else may look into the folder."""
    (state.path / FOLDER).mkdir(mode=0o700, exist_ok=True)


def place(state: Path, repository: str) -> Path:
    """The folder of what is to go to a repository."""
    return state / FOLDER / hashlib.sha256(repository.encode()).hexdigest()[:32]


def store_of(job: Job, state: Path) -> str:
    """The repository that a rank's checkpoint is written to before its gang commits."""
    return str(place(state, job.repository)) if job.local else job.repository


def announce(state: StateDir, job: Job, digest: str) -> None:
    """A rank's manifest is about to be stored here."""
    entry = Kept(job.uid, job.rank, job.repository, digest, time.time())
    state.write(KEPT, f"{job.uid}.{job.rank}", asdict(entry))


def found(state: StateDir) -> list[Kept]:
    """All that is kept here, oldest first."""
    entries = (state.read(KEPT, name) for name in state.names(KEPT))
    return sorted((Kept(**entry) for entry in entries if entry is not None), key=lambda kept: kept.at)


def upload(state: StateDir, kept: Kept, credentials: Credentials | None) -> None:
    """Copy it to its repository; what is there already is compared and not sent again, so this can be repeated.

    Raises Corrupt where what lies here is not as it was written, another StoreError for what the repository has
    against it.
    """
    with (
        open_repository(place(state.path, kept.repository)) as here,
        open_repository(kept.repository, credentials=credentials) as there,
    ):
        try:
            copy_ranks(here, there, [_descriptor(kept)])
        except (Corrupt, NotFound) as error:
            _check(here, kept)
            raise Unavailable(str(error)) from error  # of the repository, where somebody may put that right


def withdraw(kept: Kept, credentials: Credentials | None) -> None:
    """From the repository."""
    with open_repository(kept.repository, credentials=credentials) as there:
        forget(there, [_descriptor(kept)])


def _check(here: Repository, kept: Kept) -> None:
    try:
        RankReader(here, kept.digest).verify()
    except NotFound as error:
        raise Corrupt(str(error)) from error


def remove(state: StateDir, kept: Kept) -> None:
    """From the disk. What other checkpoints need of it stays."""
    where = place(state.path, kept.repository)
    if where.exists():
        with open_repository(where) as here:
            forget(here, [_descriptor(kept)])
    state.remove(KEPT, f"{kept.op}.{kept.rank}")


def tidy(state: StateDir, in_use: Collection[str]) -> None:
    """Remove the folders that hold nothing, but for those of these repositories; and what writers that were killed have
    left in the others."""
    needed = {place(state.path, repository).name for repository in in_use}
    holding = {place(state.path, kept.repository).name for kept in found(state)}
    for folder in _folders(state):
        if folder.name in holding - needed:
            with open_repository(folder) as here:
                here.sweep()
        elif folder.name not in needed:
            shutil.rmtree(folder, ignore_errors=True)


def size(state: StateDir) -> int:
    """Bytes of all that is kept here."""
    total = 0
    for folder in _folders(state):
        for where, _, files in os.walk(folder):
            for file in files:
                with suppress(FileNotFoundError):  # it is removed meanwhile
                    total += os.lstat(os.path.join(where, file)).st_size
    return total


def _folders(state: StateDir) -> list[Path]:
    return sorted((state.path / FOLDER).iterdir())


def _descriptor(kept: Kept) -> Descriptor:
    return Descriptor(MANIFEST, kept.digest, 0, RANK_ARTIFACT)
