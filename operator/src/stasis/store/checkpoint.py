"""Checkpoints of a gang: an image index over the ranks' manifests, published by a tag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from stasis.errors import Corrupt, NotFound, UsageError
from stasis.store import media
from stasis.store.connect import open_repository
from stasis.store.index import MAX_INDEX, MAX_PACK
from stasis.store.media import Buffer, Descriptor, Manifest
from stasis.store.reader import RankReader
from stasis.store.reference import Reference
from stasis.store.repository import Repository, read

_READ = 16 << 20
_PARALLEL = 3


@dataclass
class Checkpoint:
    """An opened checkpoint; a context that closes its repository if `open_checkpoint` opened it."""

    repository: Repository
    digest: str
    uid: str
    config: dict[str, Any]
    ranks: list[RankReader]  # by rank
    _closing: ExitStack

    @property
    def stored(self) -> int:
        """Bytes of all blobs that it needs, each counted once."""
        return sum({blob.digest: blob.size for rank in self.ranks for blob in rank.blobs}.values())

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Listed:
    """One line of a list of checkpoints."""

    tag: str
    digest: str
    uid: str
    ranks: int
    config: dict[str, Any]


def publish(repo: Repository, tag: str, uid: str, ranks: Sequence[Descriptor], config: Mapping[str, Any]) -> Descriptor:
    """Points `tag` to a checkpoint of these ranks (`RankResult.manifest`). After the commit, and repeatable: the same
    arguments give the same digest."""
    numbers = [rank.annotations.get(media.RANK) for rank in ranks]
    if not ranks or len(set(numbers)) != len(numbers) or any(rank.annotations.get(media.UID) != uid for rank in ranks):
        raise UsageError(f"ranks {numbers} are not those of one checkpoint {uid}")
    in_order = sorted(ranks, key=lambda rank: int(rank.annotations[media.RANK]))
    body = media.checkpoint_index(uid, in_order, config)
    if len(body) > media.MAX_MANIFEST:
        raise UsageError(f"the checkpoint's config and ranks take {len(body)} bytes, more than {media.MAX_MANIFEST}")
    return repo.put_manifest(body, media.IMAGE_INDEX, tag)


def open_checkpoint(where: str | Reference, repo: Repository | None = None) -> Checkpoint:
    """Opens by tag or digest. NotFound if there is none; Corrupt where its parts do not belong together."""
    reference = Reference.parse(where)
    with ExitStack() as closing:
        if repo is None:
            repo = closing.enter_context(open_repository(reference))
        manifest = _find(repo, reference)
        uid, config = manifest.annotations.get(media.UID, ""), _config(manifest)
        ranks = [RankReader(repo, child) for child in manifest.children]
        if any(rank.uid != uid for rank in ranks) or len({rank.rank for rank in ranks}) != len(ranks):
            raise Corrupt(f"checkpoint {manifest.descriptor.digest}: its ranks are not those of checkpoint {uid}")
        ranks.sort(key=lambda rank: rank.rank)
        return Checkpoint(repo, manifest.descriptor.digest, uid, config, ranks, closing.pop_all())


def _find(repo: Repository, reference: Reference) -> Manifest:
    if not (reference.tag or reference.digest):
        known = ", ".join(repo.tags()) or "none"
        raise UsageError(f"{reference} names no checkpoint", remedy=f"add a tag (there: {known})")
    manifest = repo.get_manifest(reference.digest or reference.tag)
    if not manifest.is_checkpoint or not manifest.children:
        raise UsageError(f"{reference} is no checkpoint of Stasis")
    return manifest


def _config(manifest: Manifest) -> dict[str, Any]:
    where = f"checkpoint {manifest.descriptor.digest}"
    return media.parse_json(manifest.annotations.get(media.CONFIG, ""), where, media.MAX_MANIFEST)


def list_checkpoints(where: str | Reference, repo: Repository | None = None) -> list[Listed]:
    """The tagged checkpoints, by tag; other artifacts in the same repository are passed over."""
    with ExitStack() as closing:
        if repo is None:
            repo = closing.enter_context(open_repository(where))
        out = []
        for tag in repo.tags():
            try:
                manifest = repo.get_manifest(tag)
            except NotFound:  # removed meanwhile
                continue
            if manifest.is_checkpoint:
                uid = manifest.annotations.get(media.UID, "")
                digest, count = manifest.descriptor.digest, len(manifest.children)
                out.append(Listed(tag, digest, uid, count, _config(manifest)))
        return out


def remove(where: str | Reference, repo: Repository | None = None) -> int:
    """Removes a checkpoint: its tags, index and rank manifests. Returns the bytes freed now: a registry's blobs are
    swept by its own garbage collection. Also removes what is left of a broken one."""
    reference = Reference.parse(where)
    with ExitStack() as closing:
        if repo is None:
            repo = closing.enter_context(open_repository(reference))
        manifest = _find(repo, reference)
        for digest in (manifest.descriptor.digest, *(child.digest for child in manifest.children)):
            try:
                repo.delete_manifest(digest)
            except NotFound:
                if digest == manifest.descriptor.digest:
                    raise
        return repo.sweep()


def forget(repo: Repository, ranks: Sequence[Descriptor]) -> None:
    """Removes rank manifests that were never published (an aborted gang); those already gone do not matter."""
    for rank in ranks:
        try:
            repo.delete_manifest(rank.digest)
        except NotFound:
            continue
    repo.sweep()


def copy(
    source: str | Reference, target: str | Reference, *, progress: Callable[[int], None] | None = None
) -> Descriptor:
    """Copies a checkpoint with all it needs, bit by bit, under the target's tag (default: the source's). Blobs that are
    there are not sent again; every byte that is sent is verified. `progress` is told bytes done."""
    start, end = Reference.parse(source), Reference.parse(target)
    tag = end.tag or start.tag
    if not tag:
        raise UsageError(f"{end} has no tag")
    with open_repository(start) as origin, open_repository(end) as goal, goal.hold():
        manifest = _find(origin, start)
        copy_ranks(origin, goal, manifest.children, progress=progress)
        return goal.put_manifest(manifest.body, media.IMAGE_INDEX, tag)


def copy_ranks(
    origin: Repository,
    goal: Repository,
    ranks: Sequence[Descriptor],
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copies ranks that may not be published yet, as `copy` does: what a restarted agent continues with."""
    with goal.hold(), ThreadPoolExecutor(_PARALLEL, thread_name_prefix="stasis-copy") as threads:
        manifests = [_child(origin, rank) for rank in ranks]
        blobs = {blob.digest: blob for manifest in manifests for blob in manifest.needs}
        jobs = [threads.submit(_copy_blob, origin, goal, blob, progress) for blob in blobs.values()]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        for manifest in manifests:
            goal.put_manifest(manifest.body, media.MANIFEST)


def _child(repo: Repository, descriptor: Descriptor) -> Manifest:
    try:
        return repo.get_manifest(descriptor.digest)
    except NotFound:
        raise Corrupt(f"manifest {descriptor.digest} is missing in {repo.reference}") from None


def _copy_blob(origin: Repository, goal: Repository, blob: Descriptor, progress: Callable[[int], None] | None) -> None:
    parts: list[Buffer] = []
    if blob.size > max(MAX_PACK, MAX_INDEX):
        raise Corrupt(f"{blob.digest} ({blob.media_type}): {blob.size} bytes are too many")
    try:
        for offset in range(0, blob.size, _READ):
            parts.append(read(origin, blob.digest, offset, min(_READ, blob.size - offset)))
    except NotFound:
        raise Corrupt(f"{blob.digest} ({blob.media_type}) is missing in {origin.reference}") from None
    if media.digest_of(*parts) != blob.digest:
        raise Corrupt(f"{blob.digest} ({blob.media_type}): its bytes have another digest")
    goal.push(blob, parts)
    if progress:
        progress(blob.size)


def verify(where: str | Reference, repo: Repository | None = None) -> int:
    """Re-reads every byte of a checkpoint; returns how many. errors.Corrupt names the broken blob."""
    with open_checkpoint(where, repo) as checkpoint:
        return sum(rank.verify() for rank in checkpoint.ranks)
