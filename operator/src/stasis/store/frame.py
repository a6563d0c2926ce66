"""Frames: about 1 MiB of chunks, compressed together (docs/format.md, Frames).

A frame is split into byte planes (stride 4 for fp32, 2 for bf16, 1 for anything else): of floating-point numbers only
the plane of exponents compresses, so the others are kept as they are and cost no time. Each plane is a zstd frame or,
where that would not be smaller, the bytes themselves.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from stasis.errors import Corrupt

MAX_FRAME = 1 << 20  # raw bytes
STRIDES = (1, 2, 4)
MAX_STORED = MAX_FRAME + 4 * max(STRIDES)
_SAMPLE_PAGES = 4
_GAIN = 0.97  # planes cost time at the restore, so they have to pay

Bytes = NDArray[np.uint8]


def checksum(stored: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(stored)


class Encoder:
    """Compresses frames; for one thread."""

    def __init__(self) -> None:
        self._plain = zstandard.ZstdCompressor(level=1)
        # A plane of exponents holds next to no matches but few different bytes: a small hash table and long matches
        # leave it to the entropy coder, which is three times as fast and stores less.
        self._planes = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(
                1, source_size=MAX_FRAME // 4, min_match=7, hash_log=6
            )
        )
        self._out = np.empty(MAX_FRAME, np.uint8)
        self._high = np.empty(MAX_FRAME // 2, np.uint16)
        self._low = np.empty(MAX_FRAME // 4, np.uint16)

    def encode(self, raw: Bytes) -> tuple[bytes, int]:
        """(stored bytes, stride) of 1 .. MAX_FRAME raw bytes."""
        stride = self._choose(raw)
        return self._encode(raw, stride), stride

    def _choose(self, raw: Bytes) -> int:
        if raw.size < 4096 * _SAMPLE_PAGES:
            return 1
        pages = raw.size // 4096
        sample = np.concatenate([raw[p * 4096 : (p + 1) * 4096] for p in range(0, pages, pages // _SAMPLE_PAGES)])
        sizes = {stride: len(self._encode(sample, stride)) for stride in STRIDES}
        best = min(sizes, key=lambda stride: sizes[stride])
        return best if sizes[best] < sizes[1] * _GAIN else 1

    def _encode(self, raw: Bytes, stride: int) -> bytes:
        sizes, parts = [], []
        for plane in self._split(raw, stride):
            packed = (self._plain if stride == 1 else self._planes).compress(plane.data)
            part = packed if len(packed) < plane.size else plane.tobytes()
            sizes.append(len(part))
            parts.append(part)
        return b"".join([struct.pack(f"<{stride}I", *sizes), *parts])

    def _split(self, raw: Bytes, stride: int) -> list[Bytes]:
        if stride == 1:
            return [raw]
        count = raw.size // stride
        whole, rest = raw[: count * stride], raw[count * stride :]
        planes = [self._out[k * count : (k + 1) * count] for k in range(stride)]
        if stride == 2:
            self._halves(whole.view(np.uint16), planes[0], planes[1])
        else:
            low = self._low[:count]
            np.copyto(low, whole.view(np.uint32), casting="unsafe")
            self._halves(low, planes[0], planes[1])
            self._halves(whole.view(np.uint16)[1::2], planes[2], planes[3])
        if rest.size:
            planes[-1] = np.concatenate([planes[-1], rest])
        return planes

    def _halves(self, words: NDArray[np.uint16], low: Bytes, high: Bytes) -> None:
        shifted = self._high[: words.size]
        np.right_shift(words, 8, out=shifted)
        np.copyto(low, words, casting="unsafe")  # keeps the low byte
        np.copyto(high, shifted, casting="unsafe")


class Decoder:
    """Reverses `Encoder`, trusting nothing; for one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=MAX_FRAME)

    def decode(self, stored: memoryview, stride: int, size: int, where: str) -> Bytes:
        """The `size` raw bytes; never allocates more than that. errors.Corrupt names `where`."""
        if stride not in STRIDES or not 1 <= size <= MAX_FRAME or len(stored) < 4 * stride:
            raise Corrupt(f"{where}: no valid frame (stride {stride}, {size} bytes)")
        sizes = struct.unpack_from(f"<{stride}I", stored)
        if 4 * stride + sum(sizes) != len(stored):
            raise Corrupt(f"{where}: the planes do not fill the frame")
        planes, at, count = [], 4 * stride, size // stride
        for k, length in enumerate(sizes):
            expected = count if k < stride - 1 else size - count * (stride - 1)
            planes.append(self._plane(stored[at : at + length], expected, where))
            at += length
        return planes[0] if stride == 1 else _merge(planes, stride, size)

    def _plane(self, stored: memoryview, size: int, where: str) -> Bytes:
        if len(stored) == size:
            return np.frombuffer(stored, np.uint8)
        try:
            # The frame's own size is what zstd allocates, so it is looked at first.
            if len(stored) > size or zstandard.frame_content_size(stored) != size:
                raise Corrupt(f"{where}: a plane is not of the size {size}")
            plane = self._zstd.decompress(stored, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Corrupt(f"{where}: {error}") from None
        if len(plane) != size:
            raise Corrupt(f"{where}: a plane has {len(plane)} bytes, not {size}")
        return np.frombuffer(plane, np.uint8)


def _merge(planes: list[Bytes], stride: int, size: int) -> Bytes:
    count = size // stride
    kind = np.uint16 if stride == 2 else np.uint32
    words: NDArray[Any] = planes[-1][:count].astype(kind)
    for plane in reversed(planes[:-1]):
        words <<= kind(8)
        words |= plane
    rest = planes[-1][count:]
    raw = words.view(np.uint8)
    return np.concatenate([raw, rest]) if rest.size else raw
