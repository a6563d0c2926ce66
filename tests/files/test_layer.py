"""What a container wrote to its root file system comes again in a fresh one, through real overlay mounts."""

import io
import os
import socket
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files.conftest import Box, seen

from stasis.agent.files.capture import Area, areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import Removed, Stats, lay, remove

pytestmark = pytest.mark.root
Boxes = Callable[..., Box]


def taken(area: Area) -> bytes:
    return b"".join(map(bytes, capture(area)))


def moved(old: Box, new: Box, record: Path, volumes: tuple[str, ...] = ()) -> dict[str, Stats]:
    """Carry all areas of one box to another."""
    with LaidList(record) as laid:
        return {area.name: lay(new.pid, area.name, io.BytesIO(taken(area)), laid) for area in areas(old.pid, volumes)}


def names(archive: bytes) -> list[str]:
    return tarfile.open(fileobj=io.BytesIO(archive)).getnames()


def change(root: Path) -> None:
    """What a trainer may do to its image."""
    (root / "etc/passwd").unlink()
    (root / "etc/hosts").write_text("changed\n")
    (root / "opt/app/main.py").chmod(0o4711)
    os.chown(root / "var/log/boot.log", 1000, 100)
    for name in ("a", "b"):
        (root / "opt/app/data" / name).unlink()
    (root / "opt/app/data").rmdir()
    (root / "opt/app/data").mkdir(mode=0o750)
    (root / "opt/app/data/new").write_bytes(b"x" * 100_000)
    os.link(root / "opt/app/data/new", root / "tmp/again")
    os.unlink(root / "logs")
    (root / "logs").mkdir()
    (root / "logs/train.log").write_text("step 1\n")
    (root / "tmp/.wh.odd").write_text("a name of the container's own")
    os.mkfifo(root / "tmp/fifo", 0o622)
    os.symlink("/etc/shadow", root / "tmp/link")
    os.setxattr(root / "tmp/again", "user.origin", b"\0\xff=\n")
    os.setxattr(root / "tmp/again", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    # An access list that new files inherit: neither the later ones nor those before it have it without being given.
    entries = ((1, 7, -1), (2, 5, 1000), (4, 5, -1), (16, 7, -1), (32, 0, -1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(root / "opt", "system.posix_acl_default", acl)
    os.setxattr(root / "opt/app", "system.posix_acl_access", acl)
    (root / "opt/inherits").mkdir()
    (root / "opt/inherits/too").write_text("x")
    (root / "opt/inherits/none").write_text("x")
    os.removexattr(root / "opt/inherits/none", "system.posix_acl_access")
    os.utime(root / "tmp", ns=(1, 1_600_000_000_123_456_789))
    os.utime(root / "tmp/link", ns=(1, 1_600_000_000_987_654_321), follow_symlinks=False)


def test_a_fresh_container_sees_what_the_old_one_saw(boxes: Boxes, tmp_path: Path) -> None:
    old, new = boxes().start(), boxes().start()
    change(old.root)
    moved(old, new, tmp_path / "list")
    assert seen(new.root) == seen(old.root)
    assert (new.root / "tmp/again").samefile(new.root / "opt/app/data/new")


def test_the_second_generation_is_carried_as_the_first(boxes: Boxes, tmp_path: Path) -> None:
    first, second, third = boxes().start(), boxes().start(), boxes().start()
    change(first.root)
    moved(first, second, tmp_path / "list")
    moved(second, third, tmp_path / "list2")
    assert seen(third.root) == seen(first.root)


def test_the_layer_is_an_oci_layer(boxes: Boxes) -> None:
    box = boxes().start()
    change(box.root)
    upper = next(area for area in areas(box.pid) if area.name == "upper")
    found = names(taken(upper))
    assert {"etc/.wh.passwd", "opt/app/data/.wh..wh..opq", "opt/app/data/new", "logs/train.log"} <= set(found)


def test_a_renamed_folder_and_a_file_with_only_new_attributes_are_carried_whole(boxes: Boxes, tmp_path: Path) -> None:
    """redirect_dir and metacopy leave the data in the image under another name."""
    old, new = boxes(options=",redirect_dir=on,metacopy=on").start(), boxes().start()
    (old.root / "opt/app").rename(old.root / "opt/moved")
    (old.root / "var/log/boot.log").chmod(0o600)
    assert "trusted.overlay.redirect" in os.listxattr(old.upper / "opt/moved")
    assert "trusted.overlay.metacopy" in os.listxattr(old.upper / "var/log/boot.log")
    moved(old, new, tmp_path / "list")
    assert seen(new.root) == seen(old.root)


def test_marks_in_user_attributes_are_understood(boxes: Boxes, tmp_path: Path) -> None:
    old, new = boxes(options=",userxattr").start(), boxes().start()
    change(old.root)
    assert os.getxattr(old.upper / "opt/app/data", "user.overlay.opaque") == b"y"
    moved(old, new, tmp_path / "list")
    assert seen(new.root) == seen(old.root)


def test_what_is_below_a_mount_is_not_the_layers(boxes: Boxes, tmp_path: Path) -> None:
    old, new = boxes(), boxes()
    for box in (old, new):
        box.volume("/var/log")
        box.volume("/tmp/volume")
        box.start()
    (old.upper / "tmp/volume/hidden").write_text("under the mount")
    (old.root / "tmp/volume/theirs").write_text("the volume's")
    (old.root / "tmp/mine").write_text("the layer's")
    found = names(taken(areas(old.pid)[0]))
    assert "tmp/mine" in found
    assert not [name for name in found if "volume" in name]
    moved(old, new, tmp_path / "list")
    assert (new.root / "tmp/mine").read_text() == "the layer's"
    assert list((new.root / "tmp/volume").iterdir()) == []


def test_a_volume_of_the_new_container_is_left_alone(boxes: Boxes, tmp_path: Path) -> None:
    """It has mounts where the old one had files of its own, below a folder that is replaced, and one that is deleted.
    From outside the container's mount namespace the kernel would let us remove the mount point, mount and all."""
    old, new = boxes().start(), boxes()
    for point in ("/opt/app/data/volume", "/var/log/volume", "/tmp/volume"):
        new.volume(point)
    new.start()
    (new.root / "opt/app/data/volume/kept").write_text("kept")
    (new.root / "var/log/volume/kept").write_text("kept")
    (old.root / "tmp/volume").mkdir()
    (old.root / "tmp/volume/old").write_text("old")
    change(old.root)
    os.unlink(old.root / "var/log/boot.log")
    (old.root / "var/log").rmdir()
    stats = moved(old, new, tmp_path / "list")["upper"]
    assert stats.skipped == 2
    assert sorted(p.name for p in (new.root / "opt/app/data").iterdir()) == ["new", "volume"]
    assert sorted(p.name for p in (new.root / "var/log").iterdir()) == ["volume"]
    for kept in ("opt/app/data/volume/kept", "var/log/volume/kept"):
        assert (new.root / kept).read_text() == "kept"
    assert list((new.root / "tmp/volume").iterdir()) == []


def test_sockets_and_devices_are_left_out_and_told(boxes: Boxes) -> None:
    box = boxes().start()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(box.root / "tmp/socket"))
    os.mknod(box.root / "tmp/disk", 0o60600, os.makedev(7, 250))
    reading = capture(areas(box.pid)[0])
    found = names(b"".join(map(bytes, reading)))
    assert "tmp/socket" not in found
    assert "tmp/disk" not in found
    assert {(note.path, note.why) for note in reading.notes} == {("tmp/socket", "a socket"), ("tmp/disk", "a device")}


def test_removing_leaves_the_fresh_container_but_for_what_was_deleted(boxes: Boxes, tmp_path: Path) -> None:
    old, new = boxes(), boxes()
    for box in (old, new):
        box.volume("/ed")
        box.start()
    (new.root / "ed/own").write_text("a sidecar's")
    (new.root / "dev/shm/own").write_text("a sidecar's")
    change(old.root)
    (old.root / "ed/deep/er").mkdir(parents=True)
    (old.root / "ed/deep/er/file").write_text("x")
    (old.root / "dev/shm/own").mkdir()
    fresh = seen(new.root)
    volume = seen(new.root / "ed")
    moved(old, new, tmp_path / "list", ("/ed",))
    (new.root / "ed/deep/er/later").write_text("of a process that was restored and killed")
    removed = remove(new.pid, LaidList(tmp_path / "list"))
    after = seen(new.root)
    missing = {path for area, path in removed.missing if area == "upper"}
    data = {"opt/app/data/a", "opt/app/data/b"}
    assert missing == data | {"etc/passwd", "etc/hosts", "opt/app/main.py", "var/log/boot.log", "logs"}
    assert after.keys() == {n for n in fresh if not any(n == m or n.startswith(f"{m}/") for m in missing)}
    assert all(after[name] == fresh[name] for name in after)
    assert seen(new.root / "ed") == volume
    assert ("shm", "own") in removed.missing
    # and the same checkpoint can be laid once more
    moved(old, new, tmp_path / "list", ("/ed",))
    assert seen(new.root) == seen(old.root)


def test_of_a_container_that_is_gone_nothing_is_removed(boxes: Boxes, tmp_path: Path) -> None:
    old, new = boxes().start(), boxes().start()
    change(old.root)
    moved(old, new, tmp_path / "list")
    new.stop()
    assert remove(new.pid, LaidList(tmp_path / "list")) == Removed(0, ())
