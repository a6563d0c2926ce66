"""Checkpoints in a real docker-registry, which restarts, fills up, collects garbage and breaks connections."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stasis.errors import Corrupt, Denied, NoSpace, NotFound, ParentLost, StoreError, Unavailable
from stasis.store import media
from stasis.store.checkpoint import copy, forget, list_checkpoints, open_checkpoint, publish, remove, verify
from stasis.store.connect import open_repository
from stasis.store.credentials import Credentials
from stasis.store.http import HttpOptions
from stasis.store.reader import RankReader
from stasis.store.repository import Repository
from stasis.store.writer import RankResult, RankWriter, StoreOptions

pytestmark = pytest.mark.registry

SMALL_PACKS = StoreOptions(pack_bytes=1 << 20, workers=2)
QUICK = HttpOptions(patience=8, first_wait=0.02, longest_wait=0.2)
MIB = 1 << 20


def noise(seed: int, mib: int = 5) -> bytes:
    return np.random.default_rng(seed).bytes(mib * MIB)


def store(repo: Repository, data: bytes, *, uid: str = "uid-1", parent: RankReader | None = None) -> RankResult:
    writer = RankWriter(repo, uid=uid, rank=0, parent=parent, options=SMALL_PACKS)
    try:
        writer.put("pages-1.img", data)
        return writer.finish({"uid": uid})
    finally:
        writer.abort()


def packs(repo: Repository, result: RankResult) -> list[str]:
    return [blob.digest for blob in RankReader(repo, result.manifest).blobs if blob.media_type == media.PACK]


def checkpoint(repo: Repository, data: bytes, tag: str, parent: RankReader | None = None) -> RankReader:
    result = store(repo, data, uid=f"uid-{tag}", parent=parent)
    publish(repo, tag, f"uid-{tag}", [result.manifest], {})
    return RankReader(repo, result.manifest)


@pytest.fixture
def repo(proxy: Any) -> Iterator[Repository]:
    with open_repository(f"{proxy.host}/ns/job", http=QUICK) as repo:
        yield repo


def test_a_checkpoint_goes_to_the_registry_and_back(repo: Repository, registry: Any, tmp_path: Path) -> None:
    data, where = noise(1), f"{repo.reference}:one"
    checkpoint(repo, data, "one")
    with open_checkpoint(where) as opened:
        assert opened.ranks[0].read("pages-1.img", len(data)) == data
    assert [found.tag for found in list_checkpoints(repo.reference)] == ["one"]
    # To a folder and to another repository, bit by bit.
    digest = copy(where, f"{tmp_path}/folder").digest
    assert copy(f"{tmp_path}/folder:one", f"{registry.host}/other/job:two").digest == digest
    assert verify(f"{registry.host}/other/job:two") > len(data)
    with open_checkpoint(f"{registry.host}/other/job@{digest}") as opened:
        assert opened.ranks[0].read("pages-1.img", len(data)) == data


def test_what_is_there_is_not_uploaded_again(repo: Repository, proxy: Any, tmp_path: Path) -> None:
    data = noise(2)
    parent = checkpoint(repo, data, "one")
    before = proxy.sent()
    assert before > len(data)
    second = store(repo, data + noise(3, 1), uid="uid-2", parent=parent)
    assert second.stats.duplicate > 0.9 * len(data)
    assert proxy.sent() - before < 1.3 * MIB
    copy(f"{repo.reference}:one", f"{tmp_path}/folder")
    before = proxy.count("PATCH")
    copy(f"{tmp_path}/folder:one", f"{repo.reference}:again")
    assert proxy.count("PATCH") == before


def test_overload_is_waited_for_as_long_as_the_registry_asks(repo: Repository, proxy: Any) -> None:
    turns, asked = iter(range(10_000)), list[str]()

    def overloaded(request: BaseHTTPRequestHandler) -> Any:
        if request.command == "HEAD" and not asked:
            asked.append(request.path)  # no other thread asks for this one
            return 429, {"Retry-After": "1"}
        return (503, {}) if next(turns) % 3 == 0 else None

    proxy.fault = overloaded
    data = noise(4)
    checkpoint(repo, data, "one")
    proxy.fault = lambda request: None
    assert verify(f"{repo.reference}:one") > len(data)
    first, second, *_ = [seen for seen in proxy.seen if seen.path == asked[0]]
    assert second.at - first.at >= 1


def test_an_upload_that_the_registry_gave_up_is_begun_anew(repo: Repository, proxy: Any) -> None:
    """docker-registry forgets an upload whose PATCH broke."""
    broken: list[str] = []

    def cut(request: BaseHTTPRequestHandler) -> Any:
        if request.command == "PATCH" and len(broken) < 2:
            broken.append(request.path)
            return "cut", 700_000
        return None

    proxy.fault = cut
    data = noise(5)
    reader = checkpoint(repo, data, "one")
    assert len(broken) == 2
    assert reader.read("pages-1.img", len(data)) == data


class Resuming:
    """Uploads as by a registry that keeps what came before a connection broke, in front of one that does not."""

    def __init__(self, proxy: Any, registry: Any, broken: int) -> None:
        self.proxy, self.registry, self.broken = proxy, registry, broken
        self.uploads: dict[str, bytes] = {}
        self.taken = 0

    def __call__(self, request: BaseHTTPRequestHandler) -> Any:
        path, _, query = request.path.partition("?")
        if "/blobs/uploads/" not in path:
            return None
        size = int(request.headers.get("Content-Length") or 0)
        if request.command == "POST":
            path += str(len(self.uploads))
            self.uploads[path] = b""
        elif request.command in ("PATCH", "PUT"):
            cut = request.command == "PATCH" and self.broken > 0
            if cut:
                self.broken -= 1
                size = size // 2
            if request.command == "PATCH":
                start = int(request.headers["Content-Range"].partition("-")[0])
                assert start == len(self.uploads[path]), "sent from elsewhere than the registry has"
            body = request.rfile.read(size)
            self.uploads[path] += body
            self.taken += len(body)
            if cut:
                request.close_connection = True
                request.connection.shutdown(socket.SHUT_RDWR)
                return "answered"
        if request.command == "PUT":
            self.pass_on(path, query)
        headers = {"Location": path, "Range": f"0-{max(0, len(self.uploads[path]) - 1)}"}
        self.proxy.answer(request, 201 if request.command == "PUT" else 202, headers)
        return "answered"

    def pass_on(self, path: str, query: str) -> None:
        upstream = HTTPConnection("127.0.0.1", self.registry.port)
        upstream.request("POST", path[: path.rindex("/") + 1])
        answer = upstream.getresponse()
        answer.read()
        upstream.request("PUT", f"{answer.getheader('Location')}&{query}", self.uploads[path])
        assert upstream.getresponse().status == 201
        upstream.close()


def test_a_broken_upload_goes_on_where_the_registry_stopped(repo: Repository, registry: Any, proxy: Any) -> None:
    proxy.fault = front = Resuming(proxy, registry, broken=3)
    data = noise(21)
    reader = checkpoint(repo, data, "one")
    assert front.broken == 0
    assert len(front.uploads) == len(reader.index.packs) + 2  # none was begun anew; index and config
    assert front.taken == sum(blob.size for blob in reader.blobs)  # and no byte was sent twice
    assert reader.read("pages-1.img", len(data)) == data


def test_a_broken_download_goes_on_where_it_stopped(repo: Repository, proxy: Any) -> None:
    data = noise(6)
    reader = checkpoint(repo, data, "one")
    broken: list[str] = []

    def cut(request: BaseHTTPRequestHandler) -> Any:
        if "/blobs/" in request.path and len(broken) < 3:
            broken.append(request.path)
            return "cut", 5_000
        return None

    _ = reader.index
    proxy.fault = cut
    assert reader.read("pages-1.img", len(data)) == data
    assert len(broken) == 3


def test_an_overloaded_registry_fails_cleanly_and_the_next_try_works(
    repo: Repository, proxy: Any, registry: Any
) -> None:
    with open_repository(repo.reference, http=HttpOptions(patience=0.2, first_wait=0.05)) as impatient:
        proxy.fault = lambda request: (503, {}) if request.command == "PATCH" else None
        with pytest.raises(Unavailable):
            store(impatient, noise(7))
        assert list_checkpoints(repo.reference, repo) == []
    assert not list((registry.root / "docker/registry/v2/repositories/ns/job/_uploads").rglob("data"))
    proxy.fault = lambda request: None
    checkpoint(repo, noise(7), "one")
    verify(f"{repo.reference}:one")


def test_a_registry_killed_in_mid_upload_and_started_again_gets_all(
    repo: Repository, registry: Any, proxy: Any
) -> None:
    patches = iter(range(10_000))

    def restart(request: BaseHTTPRequestHandler) -> Any:
        if request.command == "PATCH" and next(patches) == 2:
            registry.stop()
            threading.Timer(0.3, registry.start).start()
            return "cut", 0
        return None

    proxy.fault = restart
    data = noise(8, 8)
    reader = checkpoint(repo, data, "one")
    assert reader.read("pages-1.img", len(data)) == data
    assert reader.verify() > len(data)


def test_packs_of_the_parent_that_garbage_collection_took_are_stored_again(repo: Repository, registry: Any) -> None:
    data = noise(9)
    parent = checkpoint(repo, data, "one")
    pack = parent.index.pack_digest(0)
    remove(f"{repo.reference}:one", repo)
    registry.collect_garbage()
    assert not registry.blob(pack).exists()
    assert repo.stat(pack), "the registry's cache does not lie, so this test shows nothing"
    child = checkpoint(repo, data, "two", parent)
    assert child.read("pages-1.img", len(data)) == data
    assert verify(f"{repo.reference}:two") > len(data)


def test_packs_that_vanish_while_the_child_is_written_are_noticed(repo: Repository, registry: Any) -> None:
    data = noise(10)
    parent = checkpoint(repo, data, "one")
    writer = RankWriter(repo, uid="uid-2", rank=0, parent=parent, options=SMALL_PACKS)
    writer.put("pages-1.img", data)
    registry.blob(parent.index.pack_digest(1)).unlink()
    with pytest.raises(ParentLost, match=parent.index.pack_digest(1)):
        writer.finish({})
    assert [found.tag for found in list_checkpoints(repo.reference, repo)] == ["one"]
    again = checkpoint(repo, data, "two")  # without the parent
    assert again.read("pages-1.img", len(data)) == data


def test_a_blob_that_only_the_cache_remembers_is_uploaded_again(
    repo: Repository, registry: Any, tmp_path: Path
) -> None:
    checkpoint(repo, noise(11), "one")
    copy(f"{repo.reference}:one", f"{tmp_path}/folder")
    remove(f"{repo.reference}:one", repo)
    registry.collect_garbage()
    copy(f"{tmp_path}/folder:one", f"{repo.reference}:back")
    verify(f"{repo.reference}:back")


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "another"])
@pytest.mark.parametrize("kind", ["pack", "index", "config", "rank", "checkpoint"])
def test_damage_in_the_registry_is_found_and_named(repo: Repository, registry: Any, kind: str, damage: str) -> None:
    data = noise(19, 2)
    reader = checkpoint(repo, data, "one")
    manifest, image = repo.get_manifest(reader.digest), repo.get_manifest("one")
    assert manifest.config
    digests = {"pack": reader.index.pack_digest(1), "index": manifest.children[0].digest}
    digests |= {"config": manifest.config.digest, "rank": reader.digest, "checkpoint": image.descriptor.digest}
    path = registry.blob(digests[kind])
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        path.unlink()
    else:
        other = registry.blob(digests["config" if kind != "config" else "index"]).read_bytes()
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        path.write_bytes({"flipped": flipped, "cut": content[:middle], "another": other}[damage])
    # docker-registry itself looks at manifests: 404, or 500 where it cannot parse them.
    refusals = (Corrupt, NotFound, Unavailable) if kind in ("rank", "checkpoint") else (Corrupt,)
    with open_repository(repo.reference, http=HttpOptions(patience=0.5, first_wait=0.05)) as impatient:
        for action in (verify, restore):
            with pytest.raises(refusals) as caught:
                action(f"{repo.reference}:one", impatient)
            assert digests[kind] in str(caught.value) or "manifests/one" in str(caught.value)


def restore(where: str, repo: Repository) -> None:
    with open_checkpoint(where, repo) as opened:
        for rank in opened.ranks:
            assert rank.config
            for name in rank.names():
                rank.read(name, 1 << 30)


@pytest.mark.root
def test_a_full_registry_is_told_from_a_broken_one_and_can_be_repeated(
    make_registry: Callable[..., Any], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    registry = None
    try:
        registry = make_registry(root=disk / "data")
        with open_repository(f"{registry.host}/ns/job", http=QUICK) as repo:
            checkpoint(repo, noise(12, 2), "one")
            with pytest.raises(NoSpace):
                store(repo, noise(13, 16), uid="uid-2")
            assert [found.tag for found in list_checkpoints(repo.reference, repo)] == ["one"]
            verify(f"{repo.reference}:one")
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            checkpoint(repo, noise(13, 16), "two")
            verify(f"{repo.reference}:two")
    finally:
        if registry:
            registry.stop()
        subprocess.run(["umount", str(disk)], check=True)


def test_a_link_cut_short_by_a_full_disk_is_written_anew(registry: Any) -> None:
    with open_repository(f"{registry.host}/ns/job", http=QUICK) as repo:
        links = [registry.link("ns/job", digest) for digest in packs(repo, store(repo, noise(15, 3)))]
        registry.stop()
        for link in links:
            os.truncate(link, 0)
        registry.start()
        checkpoint(repo, noise(15, 3), "one")
        verify(f"{repo.reference}:one")


def test_a_blob_cut_short_is_never_taken_for_whole(registry: Any) -> None:
    with open_repository(f"{registry.host}/ns/job", http=QUICK) as repo:
        stored = packs(repo, store(repo, noise(16, 3)))
        registry.stop()
        for digest in stored:
            os.truncate(registry.blob(digest), 1000)
        registry.start()
        with pytest.raises(Corrupt, match=r"1000 bytes.*does not replace"):
            checkpoint(repo, noise(16, 3), "one")


def test_a_registry_that_refuses_deletion_gives_a_clear_error(make_registry: Callable[..., Any]) -> None:
    registry = make_registry(delete=False)
    with open_repository(f"{registry.host}/ns/job") as repo:
        checkpoint(repo, noise(14, 1), "one")
        with pytest.raises(StoreError, match="refuses to delete") as caught:
            remove(f"{repo.reference}:one", repo)
        assert caught.value.remedy
        verify(f"{repo.reference}:one")


def test_ranks_of_an_aborted_gang_are_forgotten(repo: Repository, registry: Any) -> None:
    result = store(repo, noise(15, 1))
    forget(repo, [result.manifest, result.manifest])
    with pytest.raises(NotFound):
        repo.get_manifest(result.manifest.digest)
    registry.collect_garbage()
    assert not any(path.is_file() for path in (registry.root / "docker/registry/v2/blobs").rglob("data"))


# "open sesame" by bcrypt
HTPASSWD = "alibaba:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"


def with_password(make_registry: Callable[..., Any], tmp_path: Path) -> Any:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    return make_registry(auth=f"auth: {{htpasswd: {{realm: tests, path: {tmp_path}/htpasswd}}}}\n")


def test_a_password_is_handed_over_or_found(
    make_registry: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = with_password(make_registry, tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    where = f"{registry.host}/ns/job"
    with open_repository(where) as repo, pytest.raises(Denied):
        repo.tags()
    with open_repository(where, credentials=Credentials("alibaba", "wrong")) as repo, pytest.raises(Denied):
        repo.tags()
    with open_repository(where, credentials=Credentials("alibaba", "open sesame")) as repo:
        checkpoint(repo, noise(16, 2), "one")
    (tmp_path / ".docker").mkdir()
    auth = Credentials("alibaba", "open sesame").basic.removeprefix("Basic ")
    (tmp_path / ".docker" / "config.json").write_text(f'{{"auths": {{"{registry.host}": {{"auth": "{auth}"}}}}}}')
    verify(f"{where}:one")
    with open_checkpoint(f"{where}:one") as opened:
        assert opened.ranks[0].read("pages-1.img", 1 << 30) == noise(16, 2)


def test_a_token_is_fetched_and_fetched_again_when_it_expires(proxy: Any, registry: Any) -> None:
    asked: list[str] = []
    left: dict[str, int] = {}

    def guard(request: BaseHTTPRequestHandler) -> Any:
        if request.path.startswith("/token"):
            assert request.headers["Authorization"] == Credentials("u", "p").basic
            asked.append(request.path)
            left[f"Bearer t{len(asked)}"] = 8
            return 200, {}, b'{"token": "t%d"}' % len(asked)
        token = request.headers.get("Authorization", "")
        left[token] = left.get(token, 0) - 1
        if left[token] >= 0:
            return None
        scope = "repository:ns/job:pull" + ("" if request.command in ("GET", "HEAD") else ",push")
        realm = f'Bearer realm="http://{proxy.host}/token",service="tests",scope="{scope}"'
        return 401, {"WWW-Authenticate": realm}

    proxy.fault = guard
    with open_repository(f"{proxy.host}/ns/job", credentials=Credentials("u", "p"), http=QUICK) as repo:
        data = noise(17)
        reader = checkpoint(repo, data, "one")
        assert reader.read("pages-1.img", len(data)) == data
    assert len(asked) > 2
    assert {"pull", "pull%2Cpush"} == {path.rpartition("%3A")[2] for path in asked}


def test_an_upload_keeps_its_pace_with_the_registry(repo: Repository, proxy: Any) -> None:
    """Back-pressure: while the registry takes nothing, the writer takes no more than its packs hold."""
    go = threading.Event()

    def hold(request: BaseHTTPRequestHandler) -> None:
        if request.command == "PATCH":
            go.wait(60)

    proxy.fault = hold
    taken, block = 0, noise(18, 1)

    def pieces() -> Iterator[bytes]:
        nonlocal taken
        for seed in range(80):
            taken += MIB
            yield block[seed:] + block[:seed]

    options = StoreOptions(memory_bytes=96 * MIB, pack_bytes=2 * MIB, workers=2, uploads=2)
    writer = RankWriter(repo, uid="uid", rank=0, options=options)
    thread = threading.Thread(target=lambda: writer.add("pages", pieces()))
    thread.start()
    try:
        last = -1
        while last != taken:
            last = taken
            time.sleep(0.5)
        assert 4 * MIB <= taken <= 60 * MIB
    finally:
        go.set()
        thread.join()
    assert writer.finish({}).stats.raw == 80 * MIB
