"""Any tree of files comes back as it was, over emptyDirs and /dev/shm, and goes again when it is removed."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.files.conftest import Box, empty, seen

from stasis.agent.files.capture import areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import lay, remove

pytestmark = pytest.mark.root

NAMES = st.one_of(
    st.sampled_from(["a", "b", ".wh.a", ".wh..wh..opq", "link_remap.1", "n" * 255, "\udcff", "a\nb", "日本"]),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=40),
).filter(lambda name: name not in (".", "..") and len(os.fsencode(name)) <= 255)
XATTRS = st.dictionaries(
    st.sampled_from(["user.a", "user.x=y", "user.%3D", "trusted.t", "trusted.overlay.opaque", "user.overlay.whiteout"]),
    st.binary(max_size=50),
    max_size=2,
)
ATTRIBUTES = st.tuples(
    st.integers(0, 0o7777), st.integers(0, 2**32 - 2), st.integers(0, 2**32 - 2), st.integers(0, 2**33 * 10**9), XATTRS
)
FILES = st.tuples(
    st.just("file"),
    ATTRIBUTES,
    st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=6000)), max_size=3),
    st.integers(0, 1 << 21),
)
SYMLINKS = st.tuples(st.just("symlink"), ATTRIBUTES, st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=150))  # fmt: skip # noqa: E501
FIFOS = st.tuples(st.just("fifo"), ATTRIBUTES)
LINKS = st.tuples(st.just("link"), st.integers(0, 100))
LEAVES = st.one_of(FILES, FILES, SYMLINKS, FIFOS, LINKS)
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda below: st.dictionaries(
        NAMES, st.one_of(LEAVES, st.tuples(st.just("folder"), ATTRIBUTES, below)), max_size=4
    ),
    max_leaves=12,
)


def build(folder: str, tree: dict[str, tuple], files: list[str]) -> None:
    for name, (kind, *rest) in tree.items():
        path = f"{folder}/{name}"
        if kind == "link":
            if not files:
                continue
            os.link(files[rest[0] % len(files)], path, follow_symlinks=False)
            continue
        if kind == "file":
            with open(path, "xb") as file:
                for offset, data in rest[1]:
                    os.pwrite(file.fileno(), data, offset)
                file.truncate(rest[2])
        elif kind == "symlink":
            os.symlink(rest[1], path)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            os.mkdir(path)
            build(path, rest[1], files)
        mode, uid, gid, mtime, xattrs = rest[0]
        os.chown(path, uid, gid, follow_symlinks=False)
        for attribute, value in xattrs.items():
            if kind in ("file", "folder") or attribute.startswith("trusted."):
                os.setxattr(path, attribute, value, follow_symlinks=False)
        if kind != "symlink":
            os.chmod(path, mode)
        if kind != "folder":
            files.append(path)
        os.utime(path, ns=(0, mtime), follow_symlinks=False)


def blocks(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.lstat().st_blocks for p in folder.rglob("*")}


@pytest.mark.parametrize("area", ["emptydir:/ed", "shm"])
def test_any_tree_comes_back_and_goes_again(boxes: Callable[..., Box], tmp_path: Path, area: str) -> None:
    old, new = boxes(), boxes()
    for box in (old, new):
        box.volume("/ed")
        box.start()
    point = {"emptydir:/ed": "ed", "shm": "dev/shm"}[area]
    source, target, record = old.root / point, new.root / point, tmp_path / "list"
    (target / "there").mkdir(mode=0o711)
    fresh = seen(target)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TREES)
    def carried(tree: dict[str, tuple]) -> None:
        empty(source)
        build(str(source), tree, [])
        os.mkdir(source / "there", 0o777) if not (source / "there").exists() else None
        found = next(a for a in areas(old.pid, ["/ed"]) if a.name == area)
        content = b"".join(map(bytes, capture(found)))
        assert content == b"".join(map(bytes, capture(found)))
        with LaidList(record) as laid:
            lay(new.pid, area, io.BytesIO(content), laid)
        try:
            assert seen(target) == seen(source)
            if area == "shm":
                assert blocks(target) == blocks(source)
        finally:
            remove(new.pid, LaidList(record))
        if (target / "there").is_dir():
            assert seen(target) == fresh
        else:  # replaced by a file of the same name
            (target / "there").mkdir(mode=0o711)
        record.unlink()

    carried()
    shutil.rmtree(target / "there")
