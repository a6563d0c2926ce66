"""Where a file has data and where holes."""

import errno
import os

from stasis.agent.files.member import MAX_EXTENTS, PAGE


def extents(fd: int, status: os.stat_result) -> tuple[tuple[int, int], ...] | None:
    """Offset and length of the data of an open file, or None where it has no holes. At most MAX_EXTENTS: of a file in
    more pieces the smallest holes are stored as zeros. A file that grows or shrinks meanwhile gives some valid list."""
    size = status.st_size
    if status.st_blocks * 512 >= size:
        return None
    pieces: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
            at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            if error.errno == errno.EINVAL:  # a file system that knows no holes
                return None
            raise
        if start < size:
            pieces.append((start, at - start))
    smallest = PAGE
    while len(pieces) > MAX_EXTENTS:
        smallest *= 2
        pieces = _joined(pieces, smallest)
    return None if pieces == [(0, size)] else tuple(pieces)


def _joined(pieces: list[tuple[int, int]], smallest: int) -> list[tuple[int, int]]:
    joined = pieces[:1]
    for start, length in pieces[1:]:
        first, before = joined[-1]
        if start - (first + before) < smallest:
            joined[-1] = (first, start + length - first)
        else:
            joined.append((start, length))
    return joined
