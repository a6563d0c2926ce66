"""The tar stream: standard, the same bytes again, aligned to pages so that unchanged files are found again."""

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files.conftest import Box, seen

from stasis.agent.files import sparse
from stasis.agent.files.capture import Area, areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import lay, remove

pytestmark = pytest.mark.root
PAGE = 4096


@pytest.fixture
def box(boxes: Callable[..., Box]) -> Box:
    made = boxes()
    made.volume("/ed")
    made.volume("/new")
    return made.start()


def area(box: Box, name: str = "emptydir:/ed") -> Area:
    return next(a for a in areas(box.pid, ["/ed"]) if a.name == name)


def taken(box: Box) -> bytes:
    return b"".join(map(bytes, capture(area(box))))


def pages(content: bytes) -> list[bytes]:
    return [content[at : at + PAGE] for at in range(0, len(content), PAGE)]


def fill(folder: Path) -> None:
    for i in range(40):
        (folder / f"d{i % 4}").mkdir(exist_ok=True)
        (folder / f"d{i % 4}/file{i}").write_bytes(os.urandom(i * 700))
    (folder / ("n" * 120)).write_bytes(os.urandom(9000))
    (folder / "\udcff\udcfe").write_text("not UTF-8")
    os.symlink("ü" * 80, folder / "link")
    os.setxattr(folder / "d1/file1", "user.a=b%c", os.urandom(500))


def test_unchanged_content_gives_the_same_bytes(box: Box) -> None:
    fill(box.root / "ed")
    assert taken(box) == taken(box)


def test_data_begins_on_a_page(box: Box) -> None:
    fill(box.root / "ed")
    members = tarfile.open(fileobj=io.BytesIO(taken(box))).getmembers()
    large = [m for m in members if m.size >= PAGE]
    assert len(large) > 30
    assert [m.name for m in large if m.offset_data % PAGE] == []


def test_pages_of_unchanged_files_are_found_again_though_others_changed(box: Box) -> None:
    fill(box.root / "ed")
    before = set(pages(taken(box)))
    (box.root / "ed/d0/file0").write_bytes(os.urandom(12345))
    (box.root / "ed/a new one").write_bytes(os.urandom(777))
    (box.root / "ed/d0/file4").unlink()
    new = [page for page in pages(taken(box)) if page not in before]
    assert len(new) <= 12


def test_other_programs_read_it(box: Box, tmp_path: Path) -> None:
    fill(box.root / "ed")
    os.link(box.root / "ed/d0/file8", box.root / "ed/zlink")
    os.utime(box.root / "ed/d0/file8", ns=(1, -1_500_000_000))
    with open(box.root / "ed/sparse", "wb") as holey:
        holey.seek(1 << 20)
        holey.write(b"x" * 9000)
        holey.truncate(5 << 20)
    (tmp_path / "tar").write_bytes(taken(box))
    for name, command in {
        "gnu": ["tar", "--xattrs", "--xattrs-include=*", "-xpf", str(tmp_path / "tar"), "-C"],
        "python": ["python3", "-c", f"import sys, tarfile; tarfile.open({str(tmp_path / 'tar')!r}).extractall(sys.argv[1])"],  # noqa: E501
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        subprocess.run([*command, str(tmp_path / name)], check=True, stderr=subprocess.DEVNULL)
    want = seen(box.root / "ed")
    assert seen(tmp_path / "gnu") == want
    got = seen(tmp_path / "python")
    assert {n: (v[4], v[5]) for n, v in got.items()} == {n: (v[4], v[5]) for n, v in want.items()}


def move(box: Box) -> None:
    with LaidList(box.folder / "list") as record:
        lay(box.pid, "emptydir:/new", io.BytesIO(taken(box)), record)


def test_holes_cost_nothing_and_stay_holes(box: Box) -> None:
    with open(box.root / "ed/huge", "wb") as huge:
        os.pwrite(huge.fileno(), b"at the start", 0)
        os.pwrite(huge.fileno(), os.urandom(3 * PAGE), 5 << 30)
        huge.truncate(10 << 30)
    with open(box.root / "ed/empty", "wb") as empty:
        empty.truncate(1 << 40)
    reading = capture(area(box))
    assert sum(len(block) for block in reading) < 64 * PAGE
    assert reading.data <= 5 * PAGE
    move(box)
    for name in ("huge", "empty"):
        old, new = (box.root / "ed" / name).stat(), (box.root / "new" / name).stat()
        assert (new.st_size, new.st_blocks, new.st_mtime_ns) == (old.st_size, old.st_blocks, old.st_mtime_ns)
    with open(box.root / "ed/huge", "rb") as old_file, open(box.root / "new/huge", "rb") as new_file:
        for at in (0, 5 << 30, (10 << 30) - PAGE):
            assert os.pread(old_file.fileno(), 4 * PAGE, at) == os.pread(new_file.fileno(), 4 * PAGE, at)


def test_a_file_in_very_many_pieces_is_carried(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than a list may name: the smallest holes become zeros, the large ones stay."""
    monkeypatch.setattr(sparse, "MAX_EXTENTS", 50)
    with open(box.root / "ed/pieces", "wb") as file:
        for i in range(200):
            os.pwrite(file.fileno(), b"%d" % i, 2 * i * PAGE + (i > 100) * (16 << 20))
    reading = capture(area(box))
    assert sum(len(block) for block in reading) < 1000 * PAGE
    move(box)
    subprocess.run(["cmp", box.root / "ed/pieces", box.root / "new/pieces"], check=True)


def test_blocks_are_whole_but_for_the_last(box: Box) -> None:
    (box.root / "ed/big").write_bytes(os.urandom(5 << 20))
    sizes = [len(block) for block in capture(area(box))]
    assert set(sizes[:-1]) == {1 << 20}
    assert sum(sizes) % PAGE == 0


def test_a_block_that_is_kept_too_long_is_an_error_and_not_other_bytes(box: Box) -> None:
    (box.root / "ed/big").write_bytes(os.urandom(3 << 20))
    kept = list(capture(area(box)))
    with pytest.raises(ValueError, match="released"):
        bytes(kept[0])


def test_a_file_that_shrinks_while_it_is_read_is_filled_up_and_told(box: Box) -> None:
    """Only another container can do this to an area whose own container is frozen."""
    (box.root / "ed/a").write_bytes(b"a" * (3 << 20))
    (box.root / "ed/b").write_text("b")
    reading = capture(area(box))
    blocks = iter(reading)
    got = bytes(next(blocks))
    os.truncate(box.root / "ed/a", 1 << 20)
    os.unlink(box.root / "ed/b")
    got += b"".join(map(bytes, blocks))
    members = tarfile.open(fileobj=io.BytesIO(got))
    a = members.extractfile("a")
    assert a is not None
    assert a.read() == b"a" * (1 << 20) + bytes(2 << 20)
    assert [(note.path, note.why.split(";")[0]) for note in reading.notes] == [
        ("a", "shrank while it was read"),
        ("b", "changed while it was read"),
    ]


def test_a_tree_deeper_than_descriptors_and_recursion_go(boxes: Callable[..., Box]) -> None:
    """In /dev/shm, which goes with the boxes: few programs can remove such a tree."""
    old, new = boxes().start(), boxes().start()
    folder = os.open(old.root / "dev/shm", os.O_RDONLY)
    for _ in range(1300):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    with LaidList(new.folder / "list") as record:
        lay(new.pid, "shm", io.BytesIO(b"".join(map(bytes, capture(areas(old.pid)[-1])))), record)
    deep = os.open(new.root / "dev/shm" / "/".join(["d"] * 1000), os.O_RDONLY)
    os.stat("/".join(["d"] * 300), dir_fd=deep)
    os.close(deep)
    remove(new.pid, LaidList(new.folder / "list"))
    assert os.listdir(new.root / "dev/shm") == []
