"""The other end of `criu --stream`: images come and go through pipes, none touches a disk.

CRIU connects once to a UNIX socket in its images folder. Each request is a little-endian u32 length and an
`img_streamer_request_entry` with the file's name; a pipe's end follows by SCM_RIGHTS (dump: the read end; restore:
after our `img_streamer_reply_entry`, the write end). (criu/img-streamer.c, images/img-streamer.proto)
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from stasis.agent.pipes import Stream, enlarge
from stasis.errors import CheckpointFailed, StasisError

CAPTURE_SOCKET = "streamer-capture.sock"
SERVE_SOCKET = "streamer-serve.sock"
MAX_NAME = 4096


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = connection.recv(count - len(data))
        if not got:
            return b""
        data += got
    return data


def _request(connection: socket.socket) -> str | None:
    """The next file name, or None where CRIU has ended the stream."""
    head = _receive(connection, 4)
    if not head:
        return None
    (length,) = struct.unpack("<I", head)
    body = _receive(connection, length) if 2 < length <= MAX_NAME else b""
    # The message is one field, number 1, a string: tag, varint length, bytes.
    name = body[2:] if body[:1] == b"\x0a" and len(body) < 130 else b""
    if not name or body[1] != len(name):
        raise CheckpointFailed(f"CRIU's stream asks for a file in a way not known: {body[:64]!r}")
    return name.decode()


def _descriptor(connection: socket.socket) -> int:
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if len(fds) != 1:
        raise CheckpointFailed("CRIU's stream ended where a pipe was due")
    return fds[0]


class _Server:
    """A thread that serves one connection of CRIU, and a thread for every image under way."""

    def __init__(self, folder: Path, socket_name: str) -> None:
        self._path = folder / socket_name
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        short = os.open(folder, os.O_PATH | os.O_CLOEXEC)  # a socket's path has 107 bytes at most
        try:
            self._listener.bind(f"/proc/self/fd/{short}/{socket_name}")
        finally:
            os.close(short)
        os.chmod(self._path, 0o600)
        self._listener.listen(1)
        self._workers: list[threading.Thread] = []
        self._connection: socket.socket | None = None
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, name=f"stream:{socket_name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._connection, _ = self._listener.accept()
            with self._connection:
                while (name := _request(self._connection)) is not None:
                    self._open(self._connection, name)
        except BaseException as error:
            if not self._closing:
                self.errors.append(error)

    _closing = False

    def _open(self, connection: socket.socket, name: str) -> None:
        raise NotImplementedError

    def _spawn(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, name="stream:image", daemon=True)
        self._workers.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait until CRIU has closed the stream and every image is through; raise what went wrong."""
        self._thread.join()
        for worker in self._workers:
            worker.join()
        self._shut()
        if self.errors:
            raise self.errors[0]

    def abandon(self) -> None:
        """CRIU is gone: wait for what hangs on its pipes, which are closed now, and forget the errors that follow."""
        self._closing = True
        self._shut()
        self._thread.join()
        for worker in self._workers:
            worker.join()

    def _shut(self) -> None:
        for end in (self._listener, self._connection):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._path.unlink(missing_ok=True)


class Capture(_Server):
    """Takes a dump's images. `make(name)` gives the stream that an image goes into."""

    def __init__(self, folder: Path, make: Callable[[str], Stream]) -> None:
        self._make = make
        self.streams: dict[str, Stream] = {}
        super().__init__(folder, CAPTURE_SOCKET)

    def _open(self, connection: socket.socket, name: str) -> None:
        fd = _descriptor(connection)
        if name in self.streams:
            os.close(fd)
            raise CheckpointFailed(f"CRIU sent the image {name} twice")
        enlarge(fd)
        stream = self.streams[name] = self._make(name)
        self._spawn(lambda: stream.take(fd))


class Serve(_Server):
    """Gives a restore its images. `sources[name](fd)` writes an image into the pipe `fd`; it need not close it."""

    def __init__(self, folder: Path, sources: Mapping[str, Callable[[int], None]]) -> None:
        self._sources = sources
        super().__init__(folder, SERVE_SOCKET)

    def _open(self, connection: socket.socket, name: str) -> None:
        source = self._sources.get(name)
        exists = b"\x08\x01" if source else b"\x08\x00"
        connection.sendall(struct.pack("<I", len(exists)) + exists)
        if source is None:
            return
        fd = _descriptor(connection)
        enlarge(fd)

        def write(source: Callable[[int], None] = source) -> None:
            try:
                source(fd)
            except BrokenPipeError:
                pass  # CRIU reads some images in part only
            finally:
                os.close(fd)

        self._spawn(write)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data` into a pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def first_error(server: _Server) -> StasisError | None:
    """What our own end of the stream failed with, where that explains a failure of CRIU."""
    return next((error for error in server.errors if isinstance(error, StasisError)), None)
