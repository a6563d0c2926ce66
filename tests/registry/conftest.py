"""A real docker-registry for each test that asks for one, and a proxy before it that misbehaves on demand."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: {delete}}}
  cache: {{blobdescriptor: inmemory}}
http: {{addr: "127.0.0.1:{port}", secret: a-secret-of-tests{tls}}}
{auth}"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Registry:
    """Its data outlives `stop` and `start`."""

    folder: Path
    root: Path
    port: int = field(default_factory=free_port)
    delete: bool = True
    auth: str = ""
    tls: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        return self.folder / "registry.yml"

    def start(self) -> Registry:
        text = CONFIG.format(
            root=self.root, delete=str(self.delete).lower(), port=self.port, auth=self.auth, tls=self.tls
        )
        self.config.write_text(text)
        with (self.folder / "registry.log").open("ab") as log:
            self.process = subprocess.Popen(["docker-registry", "serve", str(self.config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.02)
        raise AssertionError((self.folder / "registry.log").read_text())

    def stop(self, sig: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(sig)
            self.process.wait()
            self.process = None

    def collect_garbage(self) -> None:
        """As an operator does it: while the registry runs, which keeps its cache."""
        subprocess.run(["docker-registry", "garbage-collect", str(self.config)], check=True, capture_output=True)

    def blob(self, digest: str) -> Path:
        plain = digest.removeprefix("sha256:")
        return self.root / "docker/registry/v2/blobs/sha256" / plain[:2] / plain / "data"

    def link(self, name: str, digest: str) -> Path:
        """What makes a blob one of the repository's."""
        folder = self.root / "docker/registry/v2/repositories" / name / "_layers/sha256"
        return folder / digest.removeprefix("sha256:") / "link"


@pytest.fixture
def make_registry(tmp_path: Path) -> Iterator[Callable[..., Registry]]:
    made: list[Registry] = []

    def make(**options: Any) -> Registry:
        folder = tmp_path / f"registry-{len(made)}"
        folder.mkdir()
        made.append(Registry(folder, **({"root": folder / "data"} | options)))
        return made[-1].start()

    yield make
    for registry in made:
        registry.stop()


@pytest.fixture
def registry(make_registry: Callable[..., Registry]) -> Registry:
    return make_registry()


@dataclass
class Seen:
    method: str
    path: str
    size: int  # of the body as announced
    status: int  # 0: cut
    at: float = field(default_factory=time.monotonic)


def answer(client: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b"") -> None:
    client.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        client.send_header(name, value)
    client.end_headers()
    client.wfile.write(body)


class Proxy:
    """Forwards HTTP to a registry. `fault(request)` says what to do to a request: None, a (status, headers) or (status,
    headers, body) to answer instead, or ("cut", n) to break the connection after n bytes of its body (of the
    response's, for GET); "answered" if it did all itself."""

    def __init__(self, registry: Registry) -> None:
        self.fault: Callable[[BaseHTTPRequestHandler], Any] = lambda request: None
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self, registry.port)

            do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = do_DELETE = handle_any

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    answer = staticmethod(answer)

    def count(self, method: str, part: str = "") -> int:
        return sum(one.method == method and part in one.path for one in self.seen)

    def sent(self) -> int:
        """Bytes of bodies that clients sent."""
        return sum(one.size for one in self.seen)

    def handle(self, client: BaseHTTPRequestHandler, port: int) -> None:
        size = int(client.headers.get("Content-Length") or 0)
        with self.lock:
            seen = Seen(client.command, client.path, size, 0)
            self.seen.append(seen)
            fault = self.fault(client)
        if fault == "answered":
            return
        if fault and fault[0] != "cut":
            client.rfile.read(size)
            seen.status = fault[0]
            answer(client, *fault)
            return
        try:
            self.forward(client, port, size, fault[1] if fault else None, seen)
        except (OSError, HTTPException):
            client.close_connection = True

    def forward(self, client: BaseHTTPRequestHandler, port: int, size: int, cut: int | None, seen: Seen) -> None:
        upstream = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            upstream.putrequest(client.command, client.path, skip_host=True, skip_accept_encoding=True)
            for name, value in client.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders()
            left = size if cut is None or not size else min(cut, size)
            while left and (data := client.rfile.read(min(left, 1 << 20))):
                upstream.send(data)
                left -= len(data)
            if cut is not None and size:
                upstream.close()
                client.close_connection = True
                client.connection.shutdown(socket.SHUT_RDWR)
                return
            response = upstream.getresponse()
            seen.status = response.status
            client.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date", "content-length"):
                    client.send_header(name, value)
            chunked = response.getheader("Content-Length") is None and client.command != "HEAD"
            body = response.read() if chunked else b""
            client.send_header("Content-Length", response.getheader("Content-Length") or str(len(body)))
            client.end_headers()
            client.wfile.flush()
            if client.command != "HEAD":
                body = body or response.read()
                client.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                client.close_connection = True
                client.connection.shutdown(socket.SHUT_RDWR)
        finally:
            upstream.close()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def proxy(registry: Registry) -> Iterator[Proxy]:
    proxy = Proxy(registry)
    yield proxy
    proxy.close()
