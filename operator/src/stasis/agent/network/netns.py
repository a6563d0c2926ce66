"""Run something inside another network namespace.

A network namespace belongs to a thread, so a thread is made for the call, enters, and ends: the caller's never moves.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from stasis.errors import StasisError

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def call(netns_fd: int, function: Callable[[], T]) -> T:
    """The result of `function`, called in the network namespace that `netns_fd` (of /proc/PID/ns/net) stands for.

    Sockets that it opens stay in that namespace. Raises what it raises, or StasisError when the namespace cannot be
    entered (CAP_SYS_ADMIN in its user namespace is needed).
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        try:
            if _libc.setns(netns_fd, _CLONE_NEWNET):
                error = ctypes.get_errno()
                raise StasisError(f"cannot enter the network namespace: {os.strerror(error)}")
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=enter, name="netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
