"""The world around a case: a server outside the pod, tokens as kubelet writes them, huge pages of the machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stasis.errors import Unsupported
from stasis.local.network import Network, inside

TCP_PORT, UDP_PORT = 9000, 9001
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
_one_at_a_time = threading.Lock()


class Server:
    """A TCP echo and a UDP sink on the bridge's address, outside of the pod's network namespace."""

    def __init__(self, netns: Path) -> None:
        self._netns = netns
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        tcp, udp = inside(netns, self._listen)
        self._run(self._accept, tcp)
        self._run(self._receive, udp)

    def _listen(self) -> tuple[socket.socket, socket.socket]:
        tcp = socket.create_server((Network.GATEWAY, TCP_PORT))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((Network.GATEWAY, UDP_PORT))
        self._open += [tcp, udp]
        return tcp, udp

    def _run(self, work: object, connection: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(connection,), name="outside", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                connection, _ = listener.accept()
                self._open.append(connection)
                self._run(self._echo, connection)

    def _echo(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def _receive(self, udp: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                udp.recv(65536)

    def fall_silent(self) -> None:
        """From now on no answer of any kind, not even a reset."""
        rules = (
            f"add table ip silence; "
            f"add chain ip silence out {{ type filter hook output priority 0; }}; "
            f"add rule ip silence out ip saddr {Network.GATEWAY} drop"
        )
        command = ["nsenter", f"--net={self._netns}", "nft", rules]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unsupported(f"nft cannot make the server silent: {done.stderr.strip()}")

    def close(self) -> None:
        self._closed = True
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(5)


def token_folder(folder: Path, text: str) -> Path:
    """A service account's token as kubelet's atomic writer lays it: token -> ..data/token, ..data -> ..TIMESTAMP."""
    stamp = f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{time.time_ns() % 10**9}"
    (folder / stamp).mkdir(parents=True)
    (folder / stamp / "token").write_text(text)
    os.symlink(stamp, folder / "..data")
    os.symlink("..data/token", folder / "token")
    return folder


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[None]:
    """The machine has at least `count` huge pages more for as long as this lasts; one case at a time."""
    if not count:
        yield
        return
    with _one_at_a_time:
        before = int(_HUGE_PAGES.read_text())
        try:
            _HUGE_PAGES.write_text(str(before + count))
            if (got := int(_HUGE_PAGES.read_text())) < before + count:
                raise Unsupported(f"the machine can give only {got - before} of {count} huge pages")
            yield
        finally:
            _HUGE_PAGES.write_text(str(before))
