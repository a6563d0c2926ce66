"""Writes one rank's checkpoint: streams in, packs, index and manifest out.

A stream's bytes are copied into segments, cut into chunks, and handed to worker threads that hash, look up, compress
and pack; packs are pushed while the next ones fill. Every queue is bounded, so a slow repository slows `add` down.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stasis.errors import Corrupt, ParentLost, StoreError, UsageError
from stasis.store import media
from stasis.store.chunker import MAX_CHUNK, Cut, cut
from stasis.store.chunks import ChunkStore, merged
from stasis.store.frame import MAX_STORED
from stasis.store.index import MAX_NAME, MAX_PACK
from stasis.store.media import Buffer, Descriptor
from stasis.store.pack import Packer
from stasis.store.pool import Bytes, Pool
from stasis.store.reader import RankReader
from stasis.store.repository import Repository
from stasis.store.tables import Parent, Tables

_UID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SEGMENT = 4 << 20
SMALL = 64 << 10  # a stream up to this size never takes a segment
_SPILLED_PACKS = 16


@dataclass(frozen=True)
class StoreOptions:
    """`memory_bytes` bounds what a writer holds (at least 96 MiB); with `spill_dir` sealed packs wait in unlinked files
    there instead. `compress` False: for where time counts more than space. `workers` 0: one per CPU of this process."""

    memory_bytes: int = 1 << 30
    compress: bool = True
    pack_bytes: int = 64 << 20
    workers: int = 0
    uploads: int = 4
    spill_dir: Path | None = None


@dataclass(frozen=True)
class Stats:
    """Bytes, counts, and seconds of thread time per stage (`wall` is wall time)."""

    raw: int
    zero: int
    duplicate: int
    stored: int  # bytes of packs that this checkpoint added
    chunks: int
    packs: int  # all that the checkpoint needs
    pushed: int  # those uploaded by it
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class RankResult:
    manifest: Descriptor
    stats: Stats


@dataclass
class _Stream:
    name: str
    size: int = 0
    segments: int = 0
    extents: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class RankWriter:
    """`add` and `put` may be called from several threads; then either `finish` or `abort`, once.

    `parent`: an earlier checkpoint's rank in the same repository, whose chunks need not be stored again. `progress` is
    told raw bytes done since its last call, by one thread at a time.
    """

    def __init__(
        self,
        repo: Repository,
        *,
        uid: str,
        rank: int,
        parent: RankReader | None = None,
        options: StoreOptions | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if not _UID.fullmatch(uid):
            raise UsageError(f"{uid!r:.100} is no uid of a checkpoint: 1 to 64 letters, digits, '.', '_' and '-'")
        if parent is not None and parent.repository.reference.repository != repo.reference.repository:
            raise UsageError(f"the parent is in {parent.repository.reference}, not in {repo.reference}")
        options = options or StoreOptions()
        self._repo, self._uid, self._rank, self._progress = repo, uid, rank, progress
        self._started = time.monotonic()
        self._parent = parent
        with ExitStack() as closing:
            closing.enter_context(repo.hold())
            known = _known(parent) if parent else None
            self._closing = closing.pop_all()
        self._tables = Tables(known)
        workers = options.workers or len(os.sched_getaffinity(0))
        segment = SEGMENT + MAX_CHUNK
        segments = max(workers + 6, min(4 * workers, options.memory_bytes // 4 // segment))
        self._segments = Pool(segment, segments)
        room = max(options.memory_bytes - segments * segment, 32 << 20)
        pack_bytes = min(options.pack_bytes, room // 2, MAX_PACK - MAX_STORED)
        packs = _SPILLED_PACKS if options.spill_dir else max(2, min(options.uploads + 2, room // pack_bytes))
        self._packer = Packer(
            repo,
            self._tables,
            pack_bytes=pack_bytes,
            packs=packs,
            uploads=options.uploads,
            spill=options.spill_dir,
        )
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="stasis-pack")
        self._chunks = ChunkStore(self._tables, self._packer, compress=options.compress)
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._adding = 0
        self._error: BaseException | None = None
        self._done = False

    def warm(self) -> None:
        """Touches all buffers, so that what comes does not wait for fresh memory: before a freeze."""
        self._segments.warm()
        self._packer.warm()

    def put(self, name: str, data: Buffer) -> None:
        self.add(name, (data,))

    def add(self, name: str, pieces: Iterable[Buffer]) -> None:
        """Takes a stream; a piece may be reused once the next one is asked for. Blocks while memory is short.

        Raises what stopped the writer, also in another thread; a stream that ends in an exception fails the writer."""
        if not 1 <= len(name.encode()) <= MAX_NAME:
            raise UsageError(f"a stream's name has 1 to {MAX_NAME} bytes: {name!r:.100}")
        stream = _Stream(name)
        with self._lock:
            self._check()
            if name in self._streams:
                raise UsageError(f"stream {name} was added before")
            self._streams[name] = stream
            self._adding += 1
        try:
            self._take(stream, pieces)
            self._check()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            with self._lock:
                self._adding -= 1

    def _take(self, stream: _Stream, pieces: Iterable[Buffer]) -> None:
        segment, filled, pooled = np.empty(SMALL, np.uint8), 0, False
        try:
            for piece in pieces:
                data = np.frombuffer(piece, np.uint8)
                while data.size:
                    if filled == segment.size:
                        carry = segment[:filled].copy() if not pooled else self._hand_over(stream, segment, filled)
                        pooled = False
                        segment = self._segments.take()
                        pooled = True
                        filled = carry.size
                        segment[:filled] = carry
                    count = min(segment.size - filled, data.size)
                    segment[filled : filled + count] = data[:count]
                    filled += count
                    data = data[count:]
            cuts, _ = cut(segment, filled, final=True)
            stream.size += filled
        except BaseException:
            if pooled:
                self._segments.give(segment)
            raise
        self._submit(stream, segment, cuts, pooled)

    def _hand_over(self, stream: _Stream, segment: Bytes, filled: int) -> Bytes:
        """Gives a full segment to the workers and returns the bytes of the chunk that it left open."""
        cuts, covered = cut(segment, filled, final=False)
        carry = segment[covered:filled].copy()
        stream.size += covered
        self._submit(stream, segment, cuts, True)
        return carry

    def _submit(self, stream: _Stream, segment: Bytes, cuts: list[Cut], pooled: bool) -> None:
        number, stream.segments = stream.segments, stream.segments + 1
        if not pooled:  # in this thread: what is not bounded by the segments must not queue up
            self._store(stream, number, segment, cuts, pooled)
            return
        try:
            self._workers.submit(self._store, stream, number, segment, cuts, pooled)
        except RuntimeError:
            self._check()  # aborted meanwhile
            raise

    def _check(self) -> None:
        if self._error:
            raise self._error
        if self._done:
            raise UsageError("the writer is finished")

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._packer.fail(self._error)
        self._segments.fail(self._error)

    # In the worker threads.

    def _store(self, stream: _Stream, number: int, segment: Bytes, cuts: list[Cut], pooled: bool) -> None:
        try:
            if not self._error:
                stream.extents[number] = self._chunks.store(segment, cuts)
                if self._progress and cuts:
                    with self._telling:
                        self._progress(cuts[-1].end)
        except BaseException as error:
            self._fail(error)
        finally:
            if pooled:
                self._segments.give(segment)

    # The end.

    def finish(
        self, config: Mapping[str, Any], *, announce: Callable[[Descriptor], None] = lambda manifest: None
    ) -> RankResult:
        """Returns when all is durable and verified in the repository; `config` is what `RankReader.config` gives back.
        `announce` is told the manifest before it is put: what may be there should this process be killed.

        ParentLost: packs of the parent vanished meanwhile; take the checkpoint again without it."""
        if self._adding:
            raise UsageError("finish while a stream is being added")
        self._check()
        try:
            return self._finish(config, announce)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._close()

    def _finish(self, config: Mapping[str, Any], announce: Callable[[Descriptor], None]) -> RankResult:
        self._workers.shutdown(wait=True)
        self._check()
        self._chunks.flush()
        with ThreadPoolExecutor(1) as side:
            probed: Future[None] = side.submit(self._probe_parent)
            self._packer.finish()
            probed.result()
        started = time.perf_counter()
        streams = [(s.name, s.size, _joined(s)) for s in self._streams.values()]
        index = self._tables.index(self._uid, self._rank, streams)
        stats = self._stats(started)
        body = {"version": 1, "uid": self._uid, "rank": self._rank, "config": dict(config), "stats": vars(stats)}
        with ThreadPoolExecutor(2) as side:
            pushed = [
                side.submit(self._push, media.CHUNK_INDEX, index.encode()),
                side.submit(self._push, media.RANK_CONFIG, media.encode(body)),
            ]
            descriptor, config_descriptor = (done.result() for done in pushed)
        packs = [
            Descriptor(media.PACK, index.pack_digest(number), size)
            for number, size in enumerate(index.packs["size"].tolist())
        ]
        manifest = media.rank_manifest(self._uid, self._rank, config_descriptor, [descriptor, *packs])
        if len(manifest) > media.MAX_MANIFEST:
            raise StoreError(f"{len(packs)} packs are too many for a manifest", remedy="use larger packs")
        annotations = {media.UID: self._uid, media.RANK: str(self._rank)}
        plain = media.describe(media.MANIFEST, manifest)
        result = replace(plain, artifact_type=media.RANK_ARTIFACT, annotations=annotations)
        announce(result)
        self._repo.put_manifest(manifest, media.MANIFEST)
        return RankResult(result, self._stats(started))

    def _push(self, media_type: str, blob: bytes) -> Descriptor:
        descriptor = media.describe(media_type, blob)
        self._repo.push(descriptor, [blob])
        return descriptor

    def _probe_parent(self) -> None:
        used = self._tables.parent_packs_used
        if not used or self._parent is None:
            return
        there = self._parent.probe_packs(used)
        lost = [self._parent.index.pack_digest(n) for n, ok in zip(used, there, strict=True) if not ok]
        if lost:
            raise ParentLost(
                f"{len(lost)} packs of the parent vanished from {self._repo.reference}, {lost[0]} first",
                remedy="take the checkpoint again without the parent",
            )

    def _stats(self, finishing: float) -> Stats:
        done = self._chunks.counted
        seconds = {**self._chunks.seconds, **self._packer.seconds}
        seconds |= {"finish": time.perf_counter() - finishing, "wall": time.monotonic() - self._started}
        return Stats(
            raw=done.raw,
            zero=done.zero,
            duplicate=done.raw - done.zero - done.fresh,
            stored=self._packer.stored,
            chunks=self._tables.chunk_count,
            packs=self._tables.pack_count,
            pushed=self._packer.pushed,
            seconds={stage: round(value, 4) for stage, value in seconds.items()},
        )

    def abort(self) -> None:
        """Stops all threads and lets go; blobs pushed so far are named by nothing. May follow anything."""
        if self._done:
            return
        self._fail(UsageError("the writer was aborted"))
        self._close()

    def _close(self) -> None:
        self._done = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._packer.close()
        self._closing.close()


def _known(parent: RankReader) -> Parent | None:
    try:
        return Parent(parent.index, parent.probe_packs())
    except Corrupt:  # what is damaged is not built upon
        return None


def _joined(stream: _Stream) -> list[tuple[int, int]]:
    return merged(extent for number in range(stream.segments) for extent in stream.extents[number])
