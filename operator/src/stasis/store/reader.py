"""Reads one rank's checkpoint: every byte is verified before it is given to anyone."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stasis.errors import Corrupt, NotFound, UsageError
from stasis.store import media
from stasis.store.chunker import PAGE
from stasis.store.fetch import Fetcher, Frame, check_chunk
from stasis.store.index import HOLE, MAX_INDEX, MAX_PACK, Chunk, Index
from stasis.store.media import Descriptor
from stasis.store.prefetch import Keep, prefetch
from stasis.store.repository import Repository, fetch
from stasis.store.verify import verify_packs

RUN_STORED = 16 << 20  # bytes to fetch before the next run is asked for
RUN_RAW = 32 << 20  # bytes of the stream, or of the frames that it takes them from
AHEAD = 2  # runs
_ROWS = 4096  # of the chunk table at once
MAX_CONFIG = 64 << 20
_ZEROS = memoryview(bytes(1 << 20))
_NOTHING = np.empty(0, np.uint8)


@dataclass
class _Run:
    """A stretch of a stream: chunks, and holes by their bytes."""

    items: list[Chunk | int] = field(default_factory=list)
    frames: dict[int, None] = field(default_factory=dict)
    coming: dict[int, Frame] = field(default_factory=dict)


class RankReader:
    """A rank as it was stored, for any number of threads. Opening reads the manifest only; config and index follow when
    asked for. `manifest`: its descriptor or digest.

    Methods raise errors.Corrupt naming the blob (and the byte) where anything is not as it was written."""

    def __init__(self, repo: Repository, manifest: Descriptor | str) -> None:
        self.repository = repo
        self.digest = manifest if isinstance(manifest, str) else manifest.digest
        where = f"manifest {self.digest}"
        try:
            self._manifest = repo.get_manifest(self.digest)
        except NotFound:
            raise Corrupt(f"{where} is missing in {repo.reference}") from None
        notes = self._manifest.annotations
        layers = self._manifest.children
        if self._manifest.artifact_type != media.RANK_ARTIFACT or not layers:
            raise Corrupt(f"{where}: no rank of a checkpoint")
        if [layer.media_type for layer in layers] != [media.CHUNK_INDEX] + [media.PACK] * (len(layers) - 1):
            raise Corrupt(f"{where}: layers other than an index and packs")
        if any(layer.size > MAX_PACK for layer in layers[1:]):
            raise Corrupt(f"{where}: a pack of more than {MAX_PACK} bytes")
        self.uid = notes.get(media.UID, "")
        rank = notes.get(media.RANK, "")
        if not rank.isascii() or not rank.isdigit() or len(rank) > 9:
            raise Corrupt(f"{where}: {rank!r:.20} is no rank")
        self.rank = int(rank)

    @cached_property
    def _described(self) -> dict[str, Any]:
        descriptor = self._manifest.config
        if descriptor is None or descriptor.media_type != media.RANK_CONFIG:
            raise Corrupt(f"manifest {self.digest}: no config of a rank")
        where = f"config {descriptor.digest}"
        raw = media.parse_json(fetch(self.repository, descriptor, MAX_CONFIG), where, MAX_CONFIG)
        if raw.get("version") != 1 or not isinstance(raw.get("config"), dict) or not isinstance(raw.get("stats"), dict):
            raise Corrupt(f"{where}: no config of version 1")
        if (raw.get("uid"), raw.get("rank")) != (self.uid, self.rank):
            raise Corrupt(f"{where}: belongs to another rank or checkpoint")
        return raw

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """All that the rank needs: config, index and packs."""
        return self._manifest.needs

    @property
    def config(self) -> dict[str, Any]:
        """What `RankWriter.finish` was given."""
        config: dict[str, Any] = self._described["config"]
        return config

    @property
    def stats(self) -> dict[str, Any]:
        """writer.Stats as a mapping."""
        stats: dict[str, Any] = self._described["stats"]
        return stats

    @cached_property
    def index(self) -> Index:
        descriptor = self._manifest.children[0]
        index = Index.decode(fetch(self.repository, descriptor, MAX_INDEX), f"index {descriptor.digest}")
        if (index.uid, index.rank) != (self.uid, self.rank):
            raise Corrupt(f"index {descriptor.digest}: belongs to another rank or checkpoint")
        listed = {(layer.digest, layer.size) for layer in self._manifest.children[1:]}
        for number, size in enumerate(index.packs["size"].tolist()):
            if (index.pack_digest(number), size) not in listed:
                raise Corrupt(f"manifest {self.digest}: does not list pack {index.pack_digest(number)} of {size} bytes")
        return index

    def names(self) -> tuple[str, ...]:
        """The streams in the order in which they were added."""
        return self.index.names

    def size(self, name: str) -> int:
        """Bytes."""
        return int(self.index.streams["size"][self._number(name)])

    def _number(self, name: str) -> int:
        if name not in self.index.numbers:
            raise NotFound(f"rank {self.rank} has no stream {name!r:.200}")
        return self.index.numbers[name]

    def read(self, name: str, limit: int) -> bytes:
        """A stream whole; UsageError if it is larger than `limit` bytes."""
        if self.size(name) > limit:
            raise UsageError(f"stream {name} has {self.size(name)} bytes, at most {limit} were asked for")
        return b"".join(map(bytes, self.pieces(name)))

    def copy_to(self, name: str, fd: int) -> None:
        """Writes a stream in order into a pipe or file; the next runs are fetched meanwhile. Also raises OSError."""
        for piece in self.pieces(name):
            view = piece
            while view:
                view = view[os.write(fd, view) :]

    def pieces(self, name: str) -> Iterator[memoryview]:
        """A stream in order, in verified pieces of up to 1 MiB, each valid until the next is asked for. Memory stays
        below some 250 MiB."""
        runs, under_way = self._runs(self._number(name)), deque[_Run]()
        try:
            while True:
                while len(under_way) <= AHEAD and (run := next(runs, None)):
                    run.coming = self._fetcher.get(run.frames)
                    under_way.append(run)
                if not under_way:
                    return
                yield from self._play(under_way[0])
                self._fetcher.release(under_way.popleft().coming.values())
        finally:
            for run in under_way:
                self._fetcher.release(run.coming.values())

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.repository, self.index)

    def _runs(self, number: int) -> Iterator[_Run]:
        left = self.size(self.index.names[number])
        stored_of, raw_of = self.index.frames["stored"], self.index.frames["raw"]
        run, stored, raw, decoded = _Run(), 0, 0, 0
        for first, count in self.index.extents_of(number).tolist():
            if first == HOLE:
                run.items.append(min(count * PAGE, left))
                left -= min(count * PAGE, left)
                continue
            for chunk in self._chunks(first, count):
                _, frame, _, length = chunk
                run.items.append(chunk)
                if frame not in run.frames:
                    run.frames[frame] = None
                    stored += int(stored_of[frame])
                    decoded += int(raw_of[frame])
                raw += length
                left -= length
                if stored >= RUN_STORED or max(raw, decoded) >= RUN_RAW:
                    yield run
                    run, stored, raw, decoded = _Run(), 0, 0, 0
        if run.items:
            yield run

    def _chunks(self, first: int, count: int) -> Iterator[Chunk]:
        for at in range(first, first + count, _ROWS):
            yield from self.index.chunks_at(slice(at, min(at + _ROWS, first + count)))

    def _play(self, run: _Run) -> Iterator[memoryview]:
        """Neighbouring chunks of a frame come as one piece."""
        frame, start, end, raw = -1, 0, 0, _NOTHING
        for item in run.items:
            if isinstance(item, int):
                if frame >= 0:
                    yield raw.data[start:end]
                frame = -1
                yield from _zeros(item)
                continue
            if item[1] != frame or item[2] != end:
                if frame >= 0:
                    yield raw.data[start:end]
                if item[1] != frame:
                    raw = run.coming[item[1]].bytes()
                _, frame, start, _ = item
            check_chunk(self.index, item, raw)
            end = item[2] + item[3]
        if frame >= 0:
            yield raw.data[start:end]

    def prefetch(self, keep: Keep | None = None) -> None:
        """Reads all that the rank needs of its packs and compares the checksums: what is damaged or missing shows
        before any of it is used. `keep` is given the bytes, by several threads."""
        prefetch(self.repository, self.index, keep)

    def probe_packs(self, numbers: Sequence[int] | None = None) -> list[bool]:
        """For each pack of the index, by number: are its bytes really there? Its last frame is read and checked."""
        frames, last = self.index.frames, dict[int, int]()
        wanted = range(len(self.index.packs)) if numbers is None else numbers
        for frame in np.argsort(frames["offset"], kind="stable").tolist():
            last[int(frames["pack"][frame])] = frame
        # Not the reader's own fetcher: what that one keeps proves nothing about the repository.
        coming = Fetcher(self.repository, self.index).get(last[pack] for pack in wanted if pack in last)
        return [pack not in last or _arrives(coming[last[pack]]) for pack in wanted]

    def verify(self) -> int:
        """Re-reads every byte of config, index and packs; returns how many bytes. Raises what is wrong first."""
        for descriptor in self._manifest.needs:
            if (size := self.repository.stat(descriptor.digest)) != descriptor.size:
                found = "is missing" if size is None else f"has {size} bytes, not {descriptor.size}"
                raise Corrupt(f"{descriptor.digest} ({descriptor.media_type}) {found} in {self.repository.reference}")
        _ = self._described
        verify_packs(self.repository, self.index, self._manifest.children[1:])
        return sum(descriptor.size for descriptor in self._manifest.needs)


def _arrives(frame: Frame) -> bool:
    try:
        frame.bytes()
    except Corrupt:
        return False
    return True


def _zeros(size: int) -> Iterator[memoryview]:
    while size:
        yield _ZEROS[: min(size, len(_ZEROS))]
        size -= min(size, len(_ZEROS))
