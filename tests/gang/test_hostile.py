"""A tenant who means harm: what lies in its container, or in the store, never makes the agent do its work."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.gang.lab import Lab

from stasis.core.records import decision_key
from stasis.errors import CheckpointFailed, Refused, StasisError
from stasis.store import media
from stasis.store.checkpoint import open_checkpoint
from stasis.store.repository import Repository, read

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]


def build(folder: Path, name: str, *options: str) -> bytes:
    source = Path(__file__).with_name("evil.c")
    subprocess.run(["gcc", *options, f'-DMARK="/owned-{name}"', "-o", folder / name, source], check=True)
    return (folder / name).read_bytes()


def plant(root: Path, folder: Path) -> None:
    """All that a plain CRIU, its loader and its libraries would obey, and the programs that it would run."""
    for place in ("etc/criu", "root/.criu"):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "default.conf").write_text("action-script /evil\nlibdir /usr/lib/criu\nlog-file /owned-log\n")
    for place in ("usr/lib/criu", "var/lib/criu", "usr/lib/x86_64-linux-gnu/criu"):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "evil.so").write_bytes(build(folder, "plugin", "-shared", "-fPIC"))
    (root / "evil.so").write_bytes(build(folder, "preload", "-shared", "-fPIC"))
    (root / "etc/ld.so.preload").write_text("/evil.so\n")
    for place in (
        "evil",
        "usr/bin/iptables",
        "usr/bin/ip6tables",
        "usr/bin/nft",
        "usr/bin/ip",
        "usr/bin/tar",
        "usr/bin/sh",
    ):
        (root / place).unlink(missing_ok=True)
        (root / place).write_bytes(build(folder, "program"))
        (root / place).chmod(0o755)
    os.mkfifo(root / "run/criu.kdat")


def marks(one: Lab) -> list[Path]:
    return [*Path("/").glob("owned-*"), *one.folder.glob("gang/*/upper/owned-*")]


def test_planted_configuration_libraries_and_programs_have_no_effect(lab: MakeLab, tmp_path: Path) -> None:
    one = lab()
    one.progress()
    for place in one.gang.places.values():
        plant(place.container.folder / "rootfs", tmp_path)
    one.operator.suspend()
    assert marks(one) == []
    one.gang.wait(10)
    one.operator.resume()
    one.progress()
    roots = [place.container.folder / "rootfs" for place in one.gang.places.values()]
    assert all((root / "etc/ld.so.preload").exists() for root in roots)  # it was there when CRIU restored
    assert marks(one) == []
    one.operator.checkpoint()  # of a tree that was restored among them
    assert marks(one) == []
    one.finish()


def test_planted_symlinks_lead_nowhere(lab: MakeLab, tmp_path: Path) -> None:
    """In the layer, an emptyDir, /dev/shm and our own volume, whose files the agent writes."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("intact")
    one = lab(options={"emptydirs": ("/ed",)})
    one.progress()
    for place in one.gang.places.values():
        container = place.container
        for area in (container.folder / "rootfs/opt", container.emptydir("/ed"), container.folder / "shm"):
            (area / "folder").symlink_to(victim)
            (area / "file").symlink_to(victim / "file")
            (area / "up").symlink_to("../" * 20 + str(victim))
        ours = container.folder / "volume"
        (ours / "state").unlink(missing_ok=True)
        (ours / "state").symlink_to(victim / "file")
        (ours / "word").mkdir()
        (ours / "word/file").touch()
        (ours / ".word.new").mkdir()
        (ours / ".state.new").symlink_to(victim / "file")
    one.operator.suspend()
    assert one.gang.wait(10) == {0: 143, 1: 143}
    one.operator.resume()
    one.progress()
    for place in one.gang.places.values():
        opt = place.container.folder / "rootfs/opt"
        assert os.readlink(opt / "folder") == str(victim)
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (victim / "file").read_text() == "intact"
    one.finish()


LESS: dict[str, tuple[dict[str, object], str]] = {
    "capabilities": ({"capabilities": ("KILL",)}, "CAP_CHOWN"),
    "seccomp": ({"seccomp": True}, "seccomp"),
    "uid": ({"uid": 1000, "capabilities": ()}, "user 0"),
}


def test_a_checkpoint_with_more_rights_than_its_placeholder_is_refused(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    one.operator.suspend()
    one.gang.wait(10)
    for options, named in LESS.values():
        with pytest.raises(Refused, match=named):
            one.operator.resume(options=options)
        assert one.processes(0) == one.processes(1) == []
    one.operator.resume()
    one.progress()
    one.finish()


@contextmanager
def forged(one: Lab, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Rank 1's config is another one, everything that names it agrees, and it is even said to be what was committed."""
    with open_checkpoint(one.where) as checkpoint:
        repo, whole = checkpoint.repository, repo_body(checkpoint.repository, checkpoint.digest)
        index = json.loads(whole)
        manifest = json.loads(repo_body(repo, checkpoint.ranks[1].digest))
        data = read(repo, manifest["config"]["digest"], 0, manifest["config"]["size"])
        raw = json.loads(data)
        change(raw["config"])
        blob = json.dumps(raw).encode()
        config = media.describe(media.RANK_CONFIG, blob)
        repo.push(config, [blob])
        manifest["config"] |= {"digest": config.digest, "size": config.size}
        rank = repo.put_manifest(json.dumps(manifest).encode(), media.MANIFEST)
        index["manifests"][1] |= {"digest": rank.digest, "size": rank.size}
        repo.put_manifest(json.dumps(index).encode(), media.IMAGE_INDEX, "test")
        key = quote(decision_key(checkpoint.uid), safe="")
        path = one.gang.folder.with_name("gang.state") / "records" / f"{key}.json"
        record = path.read_text()
        forgery = json.loads(record)
        forgery["manifests"]["1"] = rank.digest
        path.write_text(json.dumps(forgery))
        try:
            yield
        finally:
            path.write_text(record)
            repo.put_manifest(whole, media.IMAGE_INDEX, "test")


def repo_body(repo: Repository, digest: str) -> bytes:
    return repo.get_manifest(digest).body


FORGERIES: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"rank": 0}, "rank 0"),
    "another size of the gang": ({"world_size": 3}, "of 3"),
    "descriptors of init that are no output": ({"stdio": {"pipe:[1]": 3}}, "descriptor 3"),
    "files for its output": ({"stdio": {"/etc/passwd": 1}}, "/etc/passwd"),
    "another program as init": ({"init": "/tmp/evil/init"}, "/tmp/evil/init"),
    "an init outside of the volume": ({"init": "/stasis/../init"}, "init"),
    "pids that no kernel has": ({"last_pid": (1 << 62)}, "pid"),
    "more huge pages than there are": ({"huge_pages": {"2097152": 1 << 40}}, "huge pages"),
    "a number that is a text": ({"root": "1"}, "root"),
    "files for a volume that is not carried": ({"areas": {"emptydir:/control": 1}}, "/control"),
    "files for our volume": ({"areas": {"emptydir:/stasis": 1}}, "/stasis"),
    "files for nowhere": ({"areas": {"emptydir:/../../etc": 1}}, "area"),
    "cgroups of others": ({"cgroups": [{"hierarchy": "freezer", "path": "../../evil", "processes": []}]}, "evil"),
    "a host name of two": ({"hostname": "x" * 300}, "host name"),
    "another machine": ({"fingerprint": {}}, "fingerprint"),
    "connections that are none": ({"connections": [{"local": "me"}]}, "connection"),
}
SOME = ["descriptors of init that are no output", "another program as init", "files for a volume that is not carried"]


@pytest.mark.parametrize("names", [SOME, pytest.param(list(FORGERIES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_forged_config_is_refused(lab: MakeLab, names: list[str]) -> None:
    one = lab()
    one.progress()
    files = one.suspend_into_placeholders()
    for name in names:
        change, named = FORGERIES[name]
        with forged(one, lambda config, change=change: config.update(change)):  # type: ignore[misc]
            with pytest.raises(StasisError, match=named) as caught:
                one.operator.restore()
            assert not isinstance(caught.value, CheckpointFailed), name
        assert one.not_waiting(files) == [], name
    one.operator.restore()
    one.progress()
    one.finish()
