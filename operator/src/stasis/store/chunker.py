"""Where streams are cut into chunks: at page borders, where the content says so (docs/format.md, Cuts).

A cut depends on nothing but the pages near it, so memory that comes back at another address gives the same chunks.
Cutting is a matter of the writer alone: a reader needs none of this, and the numbers may change with a new format.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
MIN_PAGES = 2
MAX_PAGES = 32
MAX_CHUNK = MAX_PAGES * PAGE
ONE_IN = 6  # a page begins a chunk with this probability: 27 KiB on average, since each moved tensor costs two chunks
_FIRST_WORD, _STEP = 5, 64  # eight words of each page are looked at, each in a cache line of its own
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, k, 1 << 64) for k in range(1, 9)], dtype=np.uint64)
_THRESHOLD = np.uint64((1 << 64) - (1 << 64) // ONE_IN)


@dataclass(frozen=True)
class Cut:
    """Bytes [start, end) of the buffer: a chunk, or a hole (zero pages)."""

    start: int
    end: int
    hole: bool = False


def cut(buffer: NDArray[np.uint8], length: int, *, final: bool) -> tuple[list[Cut], int]:
    """Cuts buffer[:length], which begins where a chunk or hole begins; returns the cuts and the bytes they cover.

    Unless `final`, `length` is a multiple of PAGE and the last chunk is left open: its bytes are to be given again at
    the front of the next buffer. If `final`, the buffer is zeroed here up to the next page border.
    """
    pages = -(-length // PAGE)
    buffer[length : pages * PAGE] = 0
    words = buffer[: pages * PAGE].view(np.uint64).reshape(pages, PAGE // 8)
    looked_at = words[:, _FIRST_WORD::_STEP]
    begins = (looked_at * _FACTORS).sum(axis=1, dtype=np.uint64) >= _THRESHOLD
    if length % PAGE:
        begins[-1] = False
    zero: NDArray[np.bool_] = np.logical_not(looked_at.any(axis=1))
    maybe = np.flatnonzero(zero)
    zero[maybe] = np.logical_not(words[maybe].any(axis=1))
    return _walk(begins, zero, length, final=final)


def _walk(begins: NDArray[np.bool_], zero: NDArray[np.bool_], length: int, *, final: bool) -> tuple[list[Cut], int]:
    pages = begins.size
    borders = np.flatnonzero(zero[1:] != zero[:-1]) + 1
    cuts: list[Cut] = []
    start = 0
    for border in [*borders.tolist(), pages]:
        if start < pages and zero[start]:
            cuts.append(Cut(start * PAGE, min(border * PAGE, length), hole=True))
            start = border
            continue
        candidates = (np.flatnonzero(begins[start:border]) + start).tolist()
        for page in [*candidates, border]:
            while page - start > MAX_PAGES:
                cuts.append(Cut(start * PAGE, (start + MAX_PAGES) * PAGE))
                start += MAX_PAGES
            if page == border:
                if page > start and (border < pages or final or page - start == MAX_PAGES):
                    cuts.append(Cut(start * PAGE, min(page * PAGE, length)))
                    start = page
            elif page - start >= MIN_PAGES:
                cuts.append(Cut(start * PAGE, page * PAGE))
                start = page
    return cuts, min(start * PAGE, length)
