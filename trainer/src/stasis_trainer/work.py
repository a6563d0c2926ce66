"""The handle of one operation: what the caller waits for, while the work of the backend can be let go before."""

from __future__ import annotations

import contextlib
import threading
import weakref
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c

ALIVE: weakref.WeakSet[HandleWork] = weakref.WeakSet()
# torch 2.6 does not keep the Python object of a Work alive that C++ holds; it would wait for ever without it.
_held_for_callers: set[HandleWork] = set()


class HandleWork(c.Work):
    def __init__(self, inner: Any, point_to_point: bool) -> None:
        super().__init__()
        self._inner = inner
        self._point_to_point = point_to_point
        self._lock = threading.Lock()
        self._finished = False
        self._error: BaseException | None = None
        self._source: int | None = None
        self._future: Any = None
        self._result: Any = None
        self._helper: threading.Thread | None = None
        ALIVE.add(self)

    def hold_for_caller(self) -> None:
        _held_for_callers.add(self)

    # What the gate asks

    def done(self) -> bool:
        inner = self._inner
        return self._finished or inner is None or (not self._point_to_point and bool(inner.is_completed()))

    def help(self) -> None:
        """Gloo's sends and receives end only in wait()."""
        if self._point_to_point and not self._finished and not self._helper:
            self._helper = threading.Thread(target=self._wait_quietly, daemon=True, name="stasis-wait")
            self._helper.start()

    def _wait_quietly(self) -> None:
        with contextlib.suppress(BaseException):
            self._wait_once()

    def _wait_once(self, *timeout: timedelta) -> bool:
        with self._lock:
            if not self._finished:
                try:
                    self._inner.wait(*timeout)
                except BaseException as error:
                    self._error = error
                    raise
                finally:
                    if self._point_to_point:
                        with contextlib.suppress(RuntimeError):
                            self._source = self._inner._source_rank()
                    self._finished, self._inner = True, None
            elif self._error:
                raise self._error
            return True

    def release(self) -> None:
        """The operation has ended: keep what may still be asked, let go what holds the group's connections."""
        with self._lock:
            inner = self._inner
            if inner is None:
                return
            with contextlib.suppress(RuntimeError):
                if not inner.is_success():
                    self._error = inner.exception()
            with contextlib.suppress(RuntimeError):
                self._future = self._future or inner.get_future()
            with contextlib.suppress(RuntimeError):
                self._result = inner.result()
            self._finished, self._inner = True, None

    # What torch and its users ask

    def wait(self, timeout: timedelta | None = None) -> bool:
        _held_for_callers.discard(self)
        return self._wait_once(timeout) if timeout else self._wait_once()

    def get_future(self) -> Any:
        _held_for_callers.discard(self)
        with self._lock:
            if self._future is None and self._inner is not None:
                self._future = self._inner.get_future()
        return self._future

    def is_completed(self) -> bool:
        inner = self._inner
        return self._finished or inner is None or bool(inner.is_completed())

    def is_success(self) -> bool:
        inner = self._inner
        return self._error is None if inner is None else bool(inner.is_success())

    def exception(self) -> Any:
        inner = self._inner
        return self._error if inner is None else inner.exception()

    def result(self) -> Any:
        inner = self._inner
        return self._result if inner is None else inner.result()

    def source_rank(self) -> int | None:
        return self._source_rank()

    def _source_rank(self) -> int | None:
        inner = self._inner
        return self._source if inner is None else inner._source_rank()

    def synchronize(self) -> None:
        inner = self._inner
        if inner is not None:
            inner.synchronize()

    def block_current_stream(self) -> None:
        inner = self._inner
        if inner is not None:
            inner.block_current_stream()

    def get_future_result(self) -> Any:
        return self._inner.get_future_result() if self._inner is not None else None

    def _get_duration(self) -> float:
        return self._inner._get_duration() if self._inner is not None else 0.0
