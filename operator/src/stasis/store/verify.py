"""Re-reads packs to the last byte: the pack's own digest, then every frame and chunk in it."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from stasis.errors import Corrupt
from stasis.store.fetch import FrameDecoder, check_chunk, read_pack
from stasis.store.frame import MAX_FRAME, MAX_STORED
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
    state, decoder, raw = hashlib.sha256(), FrameDecoder(index), np.empty(MAX_FRAME, np.uint8)
    offsets, stored = index.frames["offset"], index.frames["stored"]
    window = bytearray(_READ + MAX_STORED)
    start = position = 0  # the window holds the bytes from start to position
    todo = deque(frames)
    while position < layer.size:
        kept, count = position - start, min(_READ, layer.size - position)
        data = memoryview(window)[kept : kept + count]
        read_pack(repo, layer.digest, position, data)
        state.update(data)
        position += count
        while todo and int(offsets[todo[0]] + stored[todo[0]]) <= position:
            frame = todo.popleft()
            decoder.decode(frame, memoryview(window), start, raw)
            for chunk in index.chunks_at(chunks[frame]):
                check_chunk(index, chunk, raw)
        keep = min(int(offsets[todo[0]]), position) if todo else position
        window[: position - keep] = window[keep - start : position - start]
        start = keep
    if f"sha256:{state.hexdigest()}" != layer.digest:
        raise Corrupt(f"pack {layer.digest}: its bytes have another digest")
