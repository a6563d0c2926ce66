"""Gives up privileges for good, so that foreign bytes are parsed by a process that can do nothing (rule 27)."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from pathlib import Path

from stasis.errors import Unsupported

NOBODY = 65534
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 4, 8, 38
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = 0x20080522
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
_PATH_BENEATH = 1
_READ = 1 << 2 | 1 << 3  # files, folders
_EVERYTHING = (1 << 13) - 1  # what the first version of Landlock handles

_libc = ctypes.CDLL(None, use_errno=True)


def confine(readable: Path | None) -> None:
    """The process becomes `nobody` without capabilities, new privileges and core dumps, and can write no file.

    `readable`: the only folder that it can read, whoever owns it; None: what everybody may read. Where the kernel has
    no Landlock, the file permissions of `nobody` are the limit, and CAP_DAC_READ_SEARCH lifts that of reading."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _keep_capabilities(1 << _CAP_DAC_READ_SEARCH if readable else 0)
    _prctl(_PR_SET_DUMPABLE, 0)
    _landlock(readable or Path("/"))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise Unsupported(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _keep_capabilities(kept: int) -> None:
    header = struct.pack("<Ii", _CAPABILITY_VERSION, 0)
    if _libc.capset(header, struct.pack("<6I", kept, kept, 0, 0, 0, 0)):
        raise Unsupported(f"capset: {os.strerror(ctypes.get_errno())}")


def _landlock(readable: Path) -> None:
    rules = _libc.syscall(_LANDLOCK_CREATE, struct.pack("<Q", _EVERYTHING), 8, 0)
    if rules < 0:
        return  # an older kernel, or Landlock is off
    try:
        fd = os.open(readable, os.O_PATH | os.O_CLOEXEC)
        try:
            if _libc.syscall(_LANDLOCK_ADD, rules, _PATH_BENEATH, struct.pack("<Qi", _READ, fd), 0):
                raise Unsupported(f"landlock: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(fd)
        if _libc.syscall(_LANDLOCK_RESTRICT, rules, 0):
            raise Unsupported(f"landlock: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(rules)
