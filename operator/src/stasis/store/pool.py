"""Buffers that are used again and again: the first touch of fresh memory costs more than compressing what goes in."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stasis.errors import NoSpace

Bytes = NDArray[np.uint8]
_PAGE = 4096


class Pool:
    """At most `count` buffers of `size` bytes, made when first needed, the warmest given out first.

    With `folder` they are unlinked files of mode 0600 there, mapped, for where memory is short."""

    def __init__(self, size: int, count: int, folder: Path | None = None) -> None:
        self._size, self._unmade, self._folder = size, count, folder
        self._free: list[Bytes] = []
        self._change = threading.Condition()
        self._error: BaseException | None = None

    def take(self) -> Bytes:
        """Blocks until one is free; raises the error given to `fail`."""
        with self._change:
            while not self._error and not self._free and not self._unmade:
                self._change.wait()
            if self._error:
                raise self._error
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        return self._make()

    def give(self, buffer: Bytes) -> None:
        with self._change:
            self._free.append(buffer)
            self._change.notify()

    def fail(self, error: BaseException) -> None:
        with self._change:
            self._error = self._error or error
            self._change.notify_all()

    def warm(self) -> None:
        """Makes and touches all that are not made yet."""
        while True:
            with self._change:
                if not self._unmade:
                    return
                self._unmade -= 1
            buffer = self._make()
            buffer[::_PAGE] = 0
            self.give(buffer)

    def _make(self) -> Bytes:
        if self._folder is None:
            return np.frombuffer(mmap.mmap(-1, self._size), np.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, self._size)  # a full disk must not show as SIGBUS later
                return np.frombuffer(mmap.mmap(file.fileno(), self._size), np.uint8)
        except OSError as error:
            raise NoSpace(f"cannot make a spill file in {self._folder}: {error.strerror}") from error
