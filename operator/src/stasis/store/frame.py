"""Frames: about 1 MiB of chunks, compressed together (docs/format.md, Frames).

A frame is split into byte planes (stride 4 for fp32, 2 for bf16, 1 for anything else): of floating-point numbers only
the plane of exponents compresses, so the others are kept as they are and cost no time. Each plane is a zstd frame or,
where that would not be smaller, the bytes themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from stasis.errors import Corrupt
from stasis.store.media import Buffer
from stasis.store.pool import Bytes

MAX_FRAME = 1 << 20  # raw bytes
STRIDES = (1, 2, 4)
MAX_STORED = MAX_FRAME + 4 * max(STRIDES)
_SAMPLES, _SAMPLE = 4, 2048  # places and bytes looked at to choose the stride
_GAIN = 0.97  # planes cost time at the restore, so they have to pay


def checksum(parts: Iterable[Buffer]) -> int:
    """Of a frame's stored bytes."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def plain(raw: Bytes) -> list[Buffer]:
    """A frame of stride 1 as it is stored without compression, in parts."""
    return [struct.pack("<I", raw.size), raw.data]


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
        # Scratch: fresh memory for each frame would cost more than the splitting.
        self._out = np.empty(MAX_FRAME, np.uint8)
        self._high32 = np.empty(MAX_FRAME // 4, np.uint32)
        self._half = np.empty(MAX_FRAME // 4, np.uint16)
        self._high16 = np.empty(MAX_FRAME // 2, np.uint16)

    def encode(self, raw: Bytes) -> tuple[list[Buffer], int]:
        """(stored bytes in parts, stride) of 1 .. MAX_FRAME raw bytes; the parts are valid until the next call."""
        stride, worth = self._choose(raw)
        return self._encode(raw, stride, worth), stride

    def _choose(self, raw: Bytes) -> tuple[int, Sequence[bool]]:
        """The stride that stores a sample best, and which of its planes compress at all: the others cost no time."""
        if raw.size < 4 * _SAMPLES * _SAMPLE:
            return 1, (True,)
        step = raw.size // _SAMPLES & -4
        sample = np.concatenate([raw[at : at + _SAMPLE] for at in range(0, step * _SAMPLES, step)])
        found = {}
        for stride in STRIDES:
            _, *planes = self._encode(sample, stride, (True,) * stride)
            found[stride] = sum(map(len, planes)), [len(plane) < sample.size // stride for plane in planes]
        best = min(STRIDES, key=lambda stride: found[stride][0])
        best = best if found[best][0] < found[1][0] * _GAIN else 1
        return best, found[best][1] if best > 1 else (True,)

    def _encode(self, raw: Bytes, stride: int, worth: Sequence[bool]) -> list[Buffer]:
        parts: list[Buffer] = []
        for plane, try_it in zip(self._split(raw, stride), worth, strict=True):
            packed = (self._plain if stride == 1 else self._planes).compress(plane.data) if try_it else b""
            parts.append(packed if try_it and len(packed) < plane.size else plane.data)
        return [struct.pack(f"<{stride}I", *map(len, parts)), *parts]

    def _split(self, raw: Bytes, stride: int) -> list[Bytes]:
        if stride == 1:
            return [raw]
        count = raw.size // stride
        whole, rest = raw[: count * stride], raw[count * stride :]
        planes = [self._out[k * count : (k + 1) * count] for k in range(stride)]
        if stride == 2:
            self._halves(whole.view(np.uint16), planes[0], planes[1])
        else:
            words, high, half = whole.view(np.uint32), self._high32[:count], self._half[:count]
            np.copyto(half, words, casting="unsafe")  # an unsafe cast keeps the low bits
            self._halves(half, planes[0], planes[1])
            np.right_shift(words, 16, out=high)
            np.copyto(half, high, casting="unsafe")
            self._halves(half, planes[2], planes[3])
        if rest.size:
            planes[-1] = np.concatenate([planes[-1], rest])
        return planes

    def _halves(self, words: NDArray[np.uint16], low: Bytes, high: Bytes) -> None:
        shifted = self._high16[: words.size]
        np.right_shift(words, 8, out=shifted)
        np.copyto(low, words, casting="unsafe")
        np.copyto(high, shifted, casting="unsafe")


class Decoder:
    """Reverses `Encoder`, trusting nothing; for one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=MAX_FRAME)
        self._high = np.empty(MAX_FRAME // 2, np.uint16)
        self._low = np.empty(MAX_FRAME // 4, np.uint16)

    def decode(self, stored: memoryview, stride: int, into: Bytes, where: str) -> None:
        """Fills `into` (1 .. MAX_FRAME bytes) and never allocates more than that. errors.Corrupt names `where`."""
        if len(stored) < 4 * stride:
            raise Corrupt(f"{where}: no valid frame")
        sizes = struct.unpack_from(f"<{stride}I", stored)
        if 4 * stride + sum(sizes) != len(stored):
            raise Corrupt(f"{where}: the planes do not fill the frame")
        planes, at, count = [], 4 * stride, into.size // stride
        for k, length in enumerate(sizes):
            expected = count if k < stride - 1 else into.size - count * (stride - 1)
            planes.append(self._plane(stored[at : at + length], expected, where))
            at += length
        if stride == 1:
            into[:] = planes[0]
            return
        into[count * stride :] = planes[-1][count:]
        planes[-1] = planes[-1][:count]
        if stride == 2:
            _pair(planes[0], planes[1], into[: 2 * count].view(np.uint16))
        else:
            words, low, high = into[: 4 * count].view(np.uint32), self._low[:count], self._high[:count]
            _pair(planes[0], planes[1], low)
            _pair(planes[2], planes[3], high)
            np.copyto(words, high)
            np.left_shift(words, 16, out=words)
            np.bitwise_or(words, low, out=words)

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


def _pair(low: Bytes, high: Bytes, into: NDArray[np.uint16]) -> None:
    np.copyto(into, high)
    np.left_shift(into, 8, out=into)
    np.bitwise_or(into, low, out=into)
