"""The host name inside a container, read and set."""

from __future__ import annotations

import os
import socket

from stasis.agent import namespaces


def hostname(pid: int) -> str:
    """The host name that the process sees."""
    namespace = _open(pid)
    try:
        return namespaces.call(namespace, socket.gethostname)
    finally:
        os.close(namespace)


def set_hostname(pid: int, name: str) -> None:
    """Set it for all processes of its UTS namespace."""
    namespace = _open(pid)
    try:
        namespaces.call(namespace, lambda: socket.sethostname(name))
    finally:
        os.close(namespace)


def _open(pid: int) -> int:
    return os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
