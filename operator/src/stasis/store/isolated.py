"""A rank's reader in a process of its own without privileges: for a restore, which has many (rule 27).

`IsolatedReader` reads as `reader.RankReader` does; what parses and decompresses is `python -m stasis.store.isolated`.
Each call has a connection of its own, so several threads can read at once.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (what is imported late could not be read by then)
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from stasis import errors
from stasis.errors import Corrupt, NotFound, StasisError, StoreError
from stasis.store.connect import open_repository
from stasis.store.credentials import Credentials, find_credentials
from stasis.store.reader import MAX_CONFIG, RankReader
from stasis.store.reference import Reference
from stasis.store.sandbox import confine

_LENGTH = struct.Struct("<Q")
_SMALL = 1 << 20  # bytes of a request or an answer without data
_LISTED = 256 << 20


class IsolatedReader:
    """A context. Raises as RankReader does; StoreError where the other process died."""

    def __init__(
        self,
        where: str | Reference,
        digest: str,
        *,
        credentials: Credentials | None = None,
        plain_http: bool | None = None,
    ) -> None:
        reference = Reference.parse(where).repository
        self._control, far = socket.socketpair()
        paths = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", __name__, str(far.fileno())]
        with far:
            self._process = subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": paths}, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL
            )
        given = vars(credentials) if credentials else None
        try:
            hello = {"where": str(reference), "digest": digest, "credentials": given, "plain_http": plain_http}
            _send(self._control, json.dumps(hello).encode())
            answer = _answer(self._control, _SMALL)
        except BaseException:
            self.close()
            raise
        self.digest, self.uid, self.rank = digest, str(answer["uid"]), int(answer["rank"])

    @cached_property
    def config(self) -> dict[str, Any]:
        answer = self._ask({"op": "config"}, MAX_CONFIG)
        if not isinstance(answer.get("config"), dict):
            raise Corrupt(f"manifest {self.digest}: no config of a rank")
        return dict(answer["config"])

    @cached_property
    def _streams(self) -> dict[str, int]:
        return {str(name): int(size) for name, size in self._ask({"op": "streams"}, _LISTED)["streams"]}

    def names(self) -> tuple[str, ...]:
        return tuple(self._streams)

    def size(self, name: str) -> int:
        if name not in self._streams:
            raise NotFound(f"rank {self.rank} has no stream {name!r:.200}")
        return self._streams[name]

    def read(self, name: str, limit: int) -> bytes:
        with self._connect() as connection:
            _send(connection, json.dumps({"op": "read", "name": name, "limit": limit}).encode())
            _answer(connection, _SMALL)
            return _receive(connection, limit)

    def copy_to(self, name: str, fd: int) -> None:
        with self._connect() as connection:
            _send(connection, json.dumps({"op": "copy", "name": name}).encode())
            socket.send_fds(connection, [b"f"], [fd])
            _answer(connection, _SMALL)

    def _ask(self, request: Mapping[str, Any], limit: int) -> dict[str, Any]:
        with self._connect() as connection:
            _send(connection, json.dumps(request).encode())
            return _answer(connection, limit)

    def _connect(self) -> socket.socket:
        near, far = socket.socketpair()
        with far:
            try:
                socket.send_fds(self._control, [b"c"], [far.fileno()])
            except OSError as error:
                near.close()
                raise StoreError(f"the process that reads rank {self.rank} is gone: {error.strerror}") from error
        return near

    def close(self) -> None:
        """Ends the other process, and with it what it is doing."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _send(connection: socket.socket, data: bytes | memoryview) -> None:
    try:
        connection.sendall(_LENGTH.pack(len(data)))
        connection.sendall(data)
    except OSError as error:
        raise StoreError(f"the process that reads is gone: {error.strerror}") from error


def _receive(connection: socket.socket, limit: int) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > limit:
        raise Corrupt(f"{size} bytes of an answer, at most {limit} were asked for")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    out = bytearray(size)
    view = memoryview(out)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise StoreError("the process that reads died")
        view = view[count:]
    return bytes(out)


def _answer(connection: socket.socket, limit: int) -> dict[str, Any]:
    try:
        answer = json.loads(_receive(connection, limit))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"the process that reads answers nonsense: {error}") from None
    if "errno" in answer:
        raise OSError(int(answer["errno"]), str(answer["message"])[:2000])
    if "error" in answer:
        kind = getattr(errors, str(answer["error"]), StoreError)
        known = isinstance(kind, type) and issubclass(kind, StasisError) and kind is not errors.Refused
        raise (kind if known else StoreError)(
            str(answer["message"])[:2000], remedy=str(answer.get("remedy", ""))[:2000]
        )
    return dict(answer)


# The other process.


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, StasisError):
        return {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
    if isinstance(error, OSError) and error.errno:
        return {"errno": error.errno, "message": error.strerror or ""}
    return {"error": "StoreError", "message": f"{type(error).__name__}: {error}"}


def _serve(reader: RankReader, connection: socket.socket) -> None:
    with connection, contextlib.suppress(StoreError):
        try:
            answer, data = _do(reader, connection, json.loads(_receive(connection, _SMALL)))
        except BaseException as error:
            answer, data = _failure(error), None
        _send(connection, json.dumps(answer).encode())
        if data is not None:
            _send(connection, data)


def _do(
    reader: RankReader, connection: socket.socket, request: Mapping[str, Any]
) -> tuple[dict[str, Any], bytes | None]:
    if request["op"] == "config":
        return {"config": reader.config}, None
    if request["op"] == "streams":
        return {"streams": [(name, reader.size(name)) for name in reader.names()]}, None
    if request["op"] == "read":
        return {}, reader.read(request["name"], request["limit"])
    _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
    try:
        reader.copy_to(request["name"], fd)
    finally:
        os.close(fd)  # before the answer: the pipe's other end sees the end of the stream by then
    return {}, None


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        hello = json.loads(_receive(control, _SMALL))
        reference = Reference.parse(hello["where"])
        credentials = Credentials(**hello["credentials"]) if hello["credentials"] else None
        if reference.path is not None and not reference.path.is_dir():
            raise NotFound(f"{reference} does not exist")
        if reference.path is None and credentials is None:
            credentials = find_credentials(reference.host, reference.name)  # while they can be read
        repository = open_repository(reference, credentials=credentials, plain_http=hello["plain_http"])
        confine(reference.path)
        os.environ.update(HOME="/nonexistent", DOCKER_CONFIG="/nonexistent")
        reader = RankReader(repository, hello["digest"])
    except BaseException as error:
        _send(control, json.dumps(_failure(error)).encode())
        return
    _send(control, json.dumps({"uid": reader.uid, "rank": reader.rank}).encode())
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            os._exit(0)  # the other side is gone: threads that still write have nobody to write for
        threading.Thread(target=_serve, args=(reader, socket.socket(fileno=fds[0])), daemon=True).start()


if __name__ == "__main__":
    main()
