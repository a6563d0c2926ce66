"""Re-reads packs to the last byte: the pack's own digest, then every frame and chunk in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from stasis.errors import Corrupt, NotFound
from stasis.store.fetch import FrameDecoder, check_chunk
from stasis.store.index import Index
from stasis.store.media import Descriptor
from stasis.store.repository import Repository

_READ = 8 << 20


def verify_packs(repo: Repository, index: Index, packs: Sequence[Descriptor]) -> None:
    """Raises errors.Corrupt naming the first pack (and byte) that is not as written."""
    frames: dict[str, list[int]] = {layer.digest: [] for layer in packs}
    for frame in np.argsort(index.frames["offset"], kind="stable").tolist():
        frames[index.pack_digest(int(index.frames["pack"][frame]))].append(frame)
    order = np.argsort(index.chunks["frame"], kind="stable")
    bounds = np.searchsorted(index.chunks["frame"][order], np.arange(len(index.frames) + 1))
    chunks = [order[low:high] for low, high in pairwise(bounds)]
    threads = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0))), thread_name_prefix="stasis-verify")
    try:
        for done in [threads.submit(_verify, repo, index, layer, frames[layer.digest], chunks) for layer in packs]:
            done.result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _verify(repo: Repository, index: Index, layer: Descriptor, frames: list[int], chunks: list[np.ndarray]) -> None:
    """One pass over the pack; `frames` are those that lie in it, by offset."""
    state, decoder = hashlib.sha256(), FrameDecoder(index)
    offsets, stored = index.frames["offset"], index.frames["stored"]
    window, start, position = b"", 0, 0
    while position < layer.size:
        try:
            data = repo.read(layer.digest, position, min(_READ, layer.size - position))
        except NotFound:
            raise Corrupt(f"pack {layer.digest} is missing in {repo.reference}") from None
        state.update(data)
        window, position = window + data, position + len(data)
        while frames and int(offsets[frames[0]]) + int(stored[frames[0]]) <= position:
            frame = frames.pop(0)
            raw = decoder.decode(frame, memoryview(window), start)
            for chunk in chunks[frame].tolist():
                check_chunk(index, chunk, raw)
        keep = int(offsets[frames[0]]) if frames else position
        window, start = window[min(keep, position) - start :], min(keep, position)
    if f"sha256:{state.hexdigest()}" != layer.digest:
        raise Corrupt(f"pack {layer.digest}: its bytes have another digest")
