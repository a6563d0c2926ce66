"""Give up privileges for good, in a process that has one thread: capabilities are a thread's own."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Collection

CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SYS_ADMIN, SETFCAP = 0, 1, 3, 4, 21, 31  # linux/capability.h
_NEW_NETWORK, _NEW_IPC = 0x40000000, 0x08000000  # linux/sched.h
_CAPBSET_READ, _CAPBSET_DROP, _NO_NEW_PRIVS, _AMBIENT, _CLEAR_ALL = 23, 24, 38, 47, 4  # linux/prctl.h
_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def forsake(keep: Collection[int] = (), *, user: int = 0, see_nothing: bool = False) -> None:
    """Become `user` (0: stay root), of a group of the same number and no other, and keep of the capabilities only
    these, with no way to gain any by running a program; `user` has none. `see_nothing`: the root is an empty folder,
    there is no network and no IPC object from then on.

    OSError where the kernel does not let us, RuntimeError where other threads would keep what they have."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("privileges cannot be given up by one of several threads")
    if see_nothing:
        _checked(_libc.unshare(_NEW_NETWORK | _NEW_IPC))
        folder = tempfile.mkdtemp(prefix="stasis-empty-")
        os.chdir(folder)
        os.rmdir(folder)
        os.chroot(".")
    for capability in range(64):
        there = _libc.prctl(_CAPBSET_READ, capability, 0, 0, 0)
        if there > 0 and capability not in keep:
            _prctl(_CAPBSET_DROP, capability)
    _prctl(_AMBIENT, _CLEAR_ALL)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _reduce(sum(1 << capability for capability in keep))
    _prctl(_NO_NEW_PRIVS, 1)


def limit(kind: int, most: int) -> None:
    """Lower a limit of `resource` for good."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _reduce(mask: int) -> None:
    """What is permitted to `mask`, all of that effective, nothing inheritable."""
    header, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(header, sets))
    low, high = sets[1] & mask, sets[4] & mask >> 32
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)))


def _prctl(option: int, argument: int) -> None:
    _checked(_libc.prctl(option, argument, 0, 0, 0))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
