"""Descriptors that are held by the hundred, kept out of the way: libnftables waits with select(2), which ends the whole
process at a descriptor from 1024 on, so the lower ones are for those that come and go.

Imported by the guardian: the standard library only.
"""

from __future__ import annotations

import fcntl
import os

SELECT_LIMIT = 1024  # FD_SETSIZE


def shelved(fd: int) -> int:
    """The same open file by a high number; `fd` is closed. Where the process may have none, `fd` itself."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SELECT_LIMIT)
    except OSError:
        return fd
    os.close(fd)
    return high
