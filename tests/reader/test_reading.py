"""What a restore needs of a checkpoint comes through the reader, from a folder and from a registry."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.reader.checkpoint import CONFIG, write
from tests.reader.conftest import StartReader, Taken
from tests.registry.conftest import Registry

from stasis.agent.criu_images import ImageCodec
from stasis.agent.network.translate import Bound
from stasis.agent.reader.client import Reader
from stasis.core.connections import address
from stasis.errors import Corrupt, Denied, NotFound, Unsupported, UsageError
from stasis.store.connect import open_repository

pytestmark = pytest.mark.root

Where = tuple[str, str]
HOST = "127.1"  # this machine, by a name that is not taken for it: TLS is spoken then
HTPASSWD = "alibaba:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"


def image(reader: Reader, taken: Taken, name: str) -> bytes:
    fd, coming = taken.pipe()
    try:
        reader.image(name, fd)
    finally:
        os.close(fd)
    return coming.result()


def test_config_tasks_and_sockets(start: StartReader, stored: Where, content: dict[str, bytes]) -> None:
    reader = start(stored)
    assert reader.config() == CONFIG
    described = reader.prepare([])
    assert {f"criu/{name}" for name in described.images} == {name for name in content if name.startswith("criu/")}
    leader, thread = sorted(described.tasks, key=lambda task: task.thread)
    assert (leader.thread, thread.thread) == (7, 8)
    assert (leader.comm, leader.uids, leader.groups) == ("t", (1000, 1000, 0, 0), (5, 6))
    assert (leader.permitted, leader.no_new_privs, leader.seccomp) == (0x1F00000000F, True, 2)
    assert leader.filters == thread.filters == (b"second", b"first")
    assert described.bound == (Bound("tcp", address("10.0.0.1"), 4000),)


def test_images_come_as_they_were_or_mended(
    start: StartReader, stored: Where, content: dict[str, bytes], codec: ImageCodec, taken: Taken
) -> None:
    """A connection's queue is cut as the config says, and of files on volumes the size is not checked."""
    reader = start(stored)
    reader.config()
    described = reader.prepare(["/data"])
    got = {name: image(reader, taken, name) for name in described.images}
    changed = {name for name, data in got.items() if data != content[f"criu/{name}"]}
    assert changed == {"tcp-stream-ab.img", "files.img"}
    assert codec.load("queue", got["tcp-stream-ab.img"]).entries[0].extra == b"readtsend"
    log, code, _ = codec.load("files", got["files.img"]).messages
    assert (log.reg.name, log.reg.HasField("size"), code.reg.size) == ("/data/log", False, 8)


def test_several_streams_at_once(
    start: StartReader, stored: Where, content: dict[str, bytes], taken: Taken, tmp_path: Path
) -> None:
    reader = start(stored)
    reader.config()
    reader.prepare([])
    names = ["criu/pages-1.img", "criu/pages-2.img", "files/shm", "criu/pstree.img"] * 2
    calls = []
    for name in names:
        fd, coming = taken.pipe()
        calls.append((name, reader.start(name, fd), coming))
        os.close(fd)
    with open(tmp_path / "spilled", "wb") as file:
        reader.image("pages-2.img", file.fileno())
    for name, call, coming in calls:
        assert coming.result() == content[name]
        call.wait()
    assert (tmp_path / "spilled").read_bytes() == content["criu/pages-2.img"]


def test_who_has_enough_of_a_stream_closes_it(start: StartReader, folder: Where, taken: Taken) -> None:
    reader = start(folder)
    reader.config()
    fd, coming = taken.pipe(most=100_000)
    call = reader.start("files/shm", fd)
    os.close(fd)
    assert len(coming.result()) >= 100_000
    call.wait()
    with pytest.raises(NotFound, match="files/none"):
        reader.start("files/none", os.open(os.devnull, os.O_WRONLY)).wait()


def test_errors_come_with_their_class(start: StartReader, folder: Where, tmp_path: Path) -> None:
    where, digest = folder
    with pytest.raises(Corrupt, match="0000 is missing"):
        start((where, "sha256:" + 64 * "0")).config()
    with pytest.raises(Corrupt, match="is missing"):
        start((str(tmp_path / "nowhere"), digest)).config()
    with pytest.raises(UsageError, match="no digest"):
        start((where, "../../../etc/shadow")).config()


def test_a_config_of_another_version(start: StartReader, tmp_path: Path) -> None:
    digest = write(open_repository(tmp_path / "store"), {}, {"version": 99})
    with pytest.raises(Unsupported, match="version 99"):
        start((str(tmp_path / "store"), digest)).config()


@pytest.mark.registry
def test_a_registry_is_asked_with_what_the_agent_alone_can_read(
    start: StartReader, make_registry: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its user's password, and the certificate that is trusted."""
    key, certificate, passwords = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "htpasswd"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=tests -addext"
    command += f" subjectAltName=DNS:{HOST} -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    passwords.write_text(HTPASSWD)
    server = make_registry(
        tls=f", tls: {{certificate: {certificate}, key: {key}}}",
        auth=f"auth: {{htpasswd: {{realm: tests, path: {passwords}}}}}\n",
    )
    host = f"{HOST}:{server.port}"
    auth = base64.b64encode(b"alibaba:open sesame").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    tmp_path.chmod(0o700)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    where = f"{host}/gang"
    digest = write(open_repository(where), {"files/shm": b"data"})
    assert start((where, digest)).config() == CONFIG
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Denied):
        start((where, digest)).config()
