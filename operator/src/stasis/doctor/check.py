"""One thing that a machine has or lacks, and how it is tried without leaving a trace."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # Stasis works, but less well, or not for every program
    LACK = "lack"  # Stasis does not work here


@dataclass(frozen=True)
class Check:
    """`found` is what there is, `meaning` what its lack means, `remedy` what the user can do about it."""

    area: str
    name: str
    status: Status
    found: str
    meaning: str
    remedy: str = ""


@dataclass(frozen=True)
class Need:
    """What is looked for; the outcome of a look makes it a `Check`."""

    area: str
    name: str
    meaning: str
    remedy: str
    needed: bool = True

    def seen(self, good: bool, found: str) -> Check:
        status = Status.OK if good else Status.LACK if self.needed else Status.WARN
        return Check(self.area, self.name, status, found, self.meaning, self.remedy)

    def tried(self, probe: Callable[[], str]) -> Check:
        """`probe` returns what it found, or raises what stands in the way. Without root it is not tried."""
        if os.geteuid() != 0:
            return replace(self, needed=False, remedy="run as root").seen(False, "not tried: that takes root")
        try:
            return self.seen(True, probe())
        except PermissionError as error:
            denied = replace(self, remedy="grant the privileges that are lacking; a sandbox may forbid it all the same")
            return denied.seen(False, f"not permitted: {error.strerror}")
        except Exception as error:
            return self.seen(False, str(error).partition("\n")[0] or type(error).__name__)


_libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NETWORK = 0x00020000, 0x40000000  # linux/sched.h: CLONE_NEWNS, CLONE_NEWNET
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h


def checked(result: int) -> int:
    """The result of a call of libc. Raises OSError where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def syscall(number: int, *arguments: int | ctypes.c_uint | None) -> int:
    """A number is passed as it is, a `c_uint` by its address. Raises OSError."""
    words = [ctypes.byref(a) if isinstance(a, ctypes.c_uint) else ctypes.c_long(a or 0) for a in arguments]
    return checked(_libc.syscall(ctypes.c_long(number), *words))


def apart(flags: int, probe: Callable[[], str]) -> Callable[[], str]:
    """`probe` in namespaces of its own, which end with it: what it makes there is gone afterwards."""

    def run() -> str:
        found: list[str] = []
        failed: list[BaseException] = []

        def enter() -> None:
            try:
                checked(_libc.unshare(flags))
                if flags & NEW_MOUNTS:
                    checked(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
                found.append(probe())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=enter, name="apart")  # namespaces are a thread's, and of what it starts
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    return run


def mount_tmpfs(at: Path) -> None:
    """Raises OSError."""
    checked(_libc.mount(b"tmpfs", bytes(at), b"tmpfs", ctypes.c_ulong(0), None))


def setting(path: str) -> str | None:
    """A file's one line; None where the kernel has no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
