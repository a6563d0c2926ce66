"""Run something inside another namespace: of the network, of System V IPC, or of the host name.

These namespaces belong to a thread, so a thread is made for the call, enters, and ends: the caller's never moves.
Imported by the guardian: the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from stasis.errors import StasisError

T = TypeVar("T")

_ANY_KIND = 0
_libc = ctypes.CDLL(None, use_errno=True)


def call(namespace: int, function: Callable[[], T]) -> T:
    """The result of `function`, called in the namespace that a descriptor (of /proc/PID/ns/...) stands for.

    Sockets that it opens stay in that network namespace. Raises what it raises, or StasisError when the namespace
    cannot be entered (CAP_SYS_ADMIN in its user namespace is needed).
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        try:
            if _libc.setns(namespace, _ANY_KIND):
                raise StasisError(f"cannot enter the namespace: {os.strerror(ctypes.get_errno())}")
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=enter, name="namespace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
