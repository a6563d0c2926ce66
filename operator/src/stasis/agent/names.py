"""The host name inside a container, read and set. A UTS namespace belongs to a thread, so one is made for the call."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable

from stasis.errors import StasisError

_CLONE_NEWUTS = 0x04000000
_libc = ctypes.CDLL(None, use_errno=True)


def hostname(pid: int) -> str:
    """The host name that the process sees."""
    return _inside(pid, socket.gethostname)


def set_hostname(pid: int, name: str) -> None:
    """Set it for all processes of its UTS namespace."""

    def write() -> str:
        socket.sethostname(name)
        return name

    _inside(pid, write)


def _inside(pid: int, function: Callable[[], str]) -> str:
    result: list[str] = []
    failure: list[OSError] = []

    def run() -> None:
        try:
            fd = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY)
            try:
                if _libc.setns(fd, _CLONE_NEWUTS):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(fd)
            result.append(function())
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="uts")
    thread.start()
    thread.join()
    if failure:
        raise StasisError(f"the host name of process {pid} cannot be reached: {failure[0]}") from failure[0]
    return result[0]
