"""An archive of files is foreign bytes: what leads out of its area, or is no file of ours, is refused by name."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files.conftest import Box

from stasis.agent.files.archive import Archive
from stasis.agent.files.capture import areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import lay
from stasis.errors import Corrupt, ResourceShort, StasisError

pytestmark = pytest.mark.root


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.mode = kind, 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def archive(*members: tarfile.TarInfo, data: bytes = b"evil") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in members:
            if each.type == tarfile.REGTYPE and not each.size:
                each.size = len(data)
            tar.addfile(each, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def box(boxes: Callable[..., Box], tmp_path: Path) -> Box:
    made = boxes()
    made.volume("/ed")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("the host's")
    return made.start()


def laid(box: Box, content: bytes, area: str = "emptydir:/ed") -> None:
    with LaidList(box.folder / "list") as record:
        lay(box.pid, area, io.BytesIO(content), record)


FORGED = {
    "parent": member("../escaped"),
    "parent inside": member("a/../../escaped"),
    "absolute": member("/escaped"),
    "dot": member("a/./b"),
    "empty part": member("a//b"),
    "device": member("sda", tarfile.BLKTYPE, devmajor=7, devminor=0),
    "null": member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
    "whiteout device": member("gone", tarfile.CHRTYPE),
    "contiguous": member("contiguous", tarfile.CONTTYPE),
    "link to parent": member("key", tarfile.LNKTYPE, linkname="../secret/key"),
    "link to absolute": member("key", tarfile.LNKTYPE, linkname="/etc/shadow"),
    "link to nothing": member("key", tarfile.LNKTYPE, linkname="nothing"),
    "no folder": member("missing/file"),
    "nul": member("a\0b", pax_headers={"path": "a\0b"}),
    "long part": member("x" * 256),
    "unknown record": member("x", pax_headers={"STASIS.surprise": "1"}),
    "other attribute": member("x", pax_headers={"SCHILY.xattr.security.selinux": "root"}),
    "uid": member("x", pax_headers={"uid": "4294967295"}),
    "negative uid": member("x", pax_headers={"uid": "-1"}),
    "time": member("x", pax_headers={"mtime": "now"}),
    "data in a folder": member("x", tarfile.DIRTYPE, pax_headers={"size": "512"}),
    "overlapping extents": member(
        "x",
        pax_headers={"GNU.sparse.map": "0,4,2,2", "GNU.sparse.size": "4", "GNU.sparse.numblocks": "2"},
    ),
    "extents beyond the end": member("x", pax_headers={"GNU.sparse.map": "8,4", "GNU.sparse.size": "9"}),
    "extents without data": member("x", pax_headers={"GNU.sparse.map": "0,9", "GNU.sparse.size": "9"}),
    "extents that are no numbers": member("x", pax_headers={"GNU.sparse.map": "0,x", "GNU.sparse.size": "9"}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_member_is_refused_and_named(box: Box, tmp_path: Path, name: str) -> None:
    forged = FORGED[name]
    before = sorted(os.walk(tmp_path))
    with pytest.raises(Corrupt, match=r"member '[^']"):
        laid(box, archive(member("first", tarfile.DIRTYPE), forged))
    (box.folder / "volume_ed/first").rmdir()
    (box.folder / "list").unlink()
    assert sorted(os.walk(tmp_path)) == before


@pytest.mark.parametrize("target", ["/", "..", "../../../../../../.."])
@pytest.mark.parametrize("area", ["upper", "emptydir:/ed", "shm"])
def test_a_symlink_in_the_archive_is_not_gone_through(box: Box, tmp_path: Path, target: str, area: str) -> None:
    with pytest.raises(Corrupt, match="out/escaped"):
        laid(box, archive(member("out", tarfile.SYMTYPE, linkname=target), member("out/escaped")), area)
    with pytest.raises(Corrupt, match="'out'"):
        through = member("out", tarfile.LNKTYPE, linkname="out/etc/passwd")
        laid(box, archive(member("out", tarfile.SYMTYPE, linkname=target), through), area)
    assert not Path("/escaped").exists()


@pytest.mark.parametrize("area", ["upper", "emptydir:/ed", "shm"])
def test_a_symlink_planted_in_the_container_is_not_gone_through(box: Box, tmp_path: Path, area: str) -> None:
    """Neither as a folder on the way, nor as the last name, which is replaced and not written to."""
    top = box.root / {"upper": "", "emptydir:/ed": "ed", "shm": "dev/shm"}[area]
    secret = tmp_path / "secret"
    os.symlink(secret, top / "planted")
    with pytest.raises(Corrupt, match="planted/key"):
        laid(box, archive(member("planted/key")), area)
    os.symlink(secret / "key", top / "file")
    laid(box, archive(member("file"), member("planted", tarfile.DIRTYPE), member("planted/key")), area)
    assert (top / "file").read_text() == "evil"
    assert (top / "planted/key").read_text() == "evil"
    assert (secret / "key").read_text() == "the host's"
    assert os.listdir(secret) == ["key"]


@pytest.mark.parametrize("name", [".wh...", ".wh..", ".wh.", ".wh..wh.plnk", ".wh..wh..opq", "opt/.wh.full"])
def test_a_whiteout_of_no_name_is_refused(box: Box, name: str) -> None:
    with pytest.raises(Corrupt):
        laid(box, archive(member(name), data=b"x" if name.endswith("full") else b""), "upper")
    assert (box.root / "etc/passwd").exists()


def test_a_header_that_claims_gigabytes_takes_no_memory(box: Box) -> None:
    claimed = member("x", tarfile.XHDTYPE)
    claimed.size = (8 << 30) - 1
    with pytest.raises(Corrupt, match="PAX header"):
        laid(box, claimed.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))


def test_every_truncation_and_a_changed_header_are_noticed(box: Box) -> None:
    (box.root / "ed/file").write_bytes(os.urandom(5000))
    os.setxattr(box.root / "ed/file", "user.a", b"b")
    (box.root / "ed/folder").mkdir()
    whole = b"".join(map(bytes, capture(areas(box.pid, ["/ed"])[-1])))
    used = len(whole.rstrip(b"\0")) + 512

    def read(content: bytes) -> None:
        parsed = Archive(io.BytesIO(content), "x", overlay=False)
        for each in parsed.members():
            for _ in parsed.data(each):
                pass

    read(whole)
    for cut in range(0, used, 173):
        with pytest.raises(Corrupt):
            read(whole[:cut])
    with pytest.raises(Corrupt, match="after the end"):
        read(whole + b"x")
    headers = tarfile.open(fileobj=io.BytesIO(whole)).getmember("file").offset_data - 512
    for at in range(headers, headers + 257, 16):
        with pytest.raises(Corrupt):
            read(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])


def test_a_full_file_system_is_told_with_its_size(boxes: Callable[..., Box]) -> None:
    box = boxes(shm="1m").start()
    with pytest.raises(ResourceShort, match=r"/dev/shm of the new container is full \(1 MiB\)"):
        laid(box, archive(member("big"), data=bytes(range(256)) * 8192), "shm")


def test_an_area_that_the_new_container_lacks_is_refused(box: Box) -> None:
    for point in ("/tmp", "/nowhere"):
        with pytest.raises(StasisError, match=point):
            laid(box, archive(), f"emptydir:{point}")
