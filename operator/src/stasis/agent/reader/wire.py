"""Messages between an agent and its reader: a length, JSON of one object, descriptors. What the reader says is foreign
to the agent: bounded in size and time, checked for its types by who asked."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stasis import errors
from stasis.errors import RestoreFailed, StasisError

MAX_ANSWER = 128 << 20  # a config may have 64 MiB, and credentials of many threads come on top
MAX_REQUEST = 1 << 20
_TEXT = 20_000  # characters of an error

_LENGTH = struct.Struct("<I")


class Nonsense(Exception):
    """The other end does not keep to the protocol."""


def send(to: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """OSError where the other end is gone."""
    body = json.dumps(message, separators=(",", ":")).encode()
    socket.send_fds(to, [_LENGTH.pack(len(body))], fds)
    to.sendall(body)


def receive(
    source: socket.socket, limit: int, *, fds: int = 0, seconds: float | None = None
) -> tuple[dict[str, Any], list[int]]:
    """The next message, of at most `limit` bytes and `fds` descriptors, these close-on-exec.

    EOFError: the other end is gone. TimeoutError: the message is not there after `seconds`. Nonsense: it is none.
    """
    end = None if seconds is None else time.monotonic() + seconds
    _await(source, end)
    head, found, _, _ = socket.recv_fds(source, _LENGTH.size, fds, socket.MSG_CMSG_CLOEXEC)
    head += _exactly(source, _LENGTH.size - len(head), end) if head else b""
    if not head:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise Nonsense(f"a message of {length} bytes")
    try:
        message = json.loads(_exactly(source, length, end))
    except (ValueError, RecursionError):
        raise Nonsense("no JSON") from None
    if not isinstance(message, dict):
        raise Nonsense("no object")
    return message, found


def _exactly(source: socket.socket, count: int, end: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        _await(source, end)
        piece = source.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _await(source: socket.socket, end: float | None) -> None:
    if end is not None:
        source.settimeout(max(end - time.monotonic(), 0.001))


def told(error: BaseException) -> dict[str, Any]:
    """An error as a message."""
    if isinstance(error, StasisError):
        kind = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        return {"error": [kind.__name__, error.message[:_TEXT], error.remedy[:_TEXT]]}
    return {"error": [RestoreFailed.__name__, f"{type(error).__name__}: {error}"[:_TEXT], ""]}


def revived(error: object) -> StasisError:
    """The error of such a message. Nonsense where it is none."""
    if not isinstance(error, list) or len(error) != 3 or not all(isinstance(part, str) for part in error):
        raise Nonsense("no error")
    name, message, remedy = error
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, StasisError) or issubclass(kind, errors.Refused):
        kind = RestoreFailed
    return kind(message[:_TEXT], remedy=remedy[:_TEXT])
