"""kcmp(2): whether two processes have the same kernel object, which no file of /proc tells."""

from __future__ import annotations

import ctypes
import platform

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1)
_FILE, _VM, _EPOLL_TFD = 0, 1, 7


class _EpollSlot(ctypes.Structure):
    _fields_ = [("efd", ctypes.c_uint32), ("tfd", ctypes.c_uint32), ("toff", ctypes.c_uint32)]


def _same(*arguments: object) -> bool:
    result: int = _LIBC.syscall(_SYS_KCMP, *arguments)
    return result == 0


def same_memory(one: int, other: int) -> bool:
    return _same(one, other, _VM, 0, 0)


def same_file(one: int, its: int, other: int, others: int) -> bool:
    """Descriptor `its` of process `one` and descriptor `others` of process `other` are one open file description."""
    return _same(one, other, _FILE, ctypes.c_ulong(its), ctypes.c_ulong(others))


def watches(pid: int, epoll: int, target: int, offset: int, fd: int) -> bool:
    """`fd` of the process is what its epoll set watches as `target`, the `offset`-th of that number."""
    slot = _EpollSlot(epoll, target, offset)
    return _same(pid, pid, _EPOLL_TFD, ctypes.c_ulong(fd), ctypes.byref(slot))
