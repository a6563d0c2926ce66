"""Which parts of a container are carried, and whether the new container has room for them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files.conftest import Box

from stasis.agent.files.areas import Room, require_room, room
from stasis.agent.files.capture import areas
from stasis.errors import ResourceShort, Unsupported, UsageError

pytestmark = pytest.mark.root

# The box's root has no program to do it with.
REMOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY)
assert libc.setns(fd, 0) == 0
assert libc.mount(b"none", b"/", None, 4096 | 32 | 1, None) == 0, os.strerror(ctypes.get_errno())
"""


def test_what_is_carried_and_what_is_not(boxes: Callable[..., Box], tmp_path: Path) -> None:
    box = boxes()
    shared = box.volume("/ed")
    box.volume("/again", source=shared)
    box.volume("/a b,c\\d")
    box.volume("/token", "ro")
    box.volume("/unnamed")
    box.start()
    named = ["/ed", "/again", "/a b,c\\d", "/token", "/stasis", "/dev/shm"]
    found = areas(box.pid, named)
    assert [area.name for area in found] == ["upper", "shm", "emptydir:/ed", "emptydir:/a b,c\\d"]
    assert found[0].upper == str(box.upper)
    with pytest.raises(UsageError, match="/nowhere"):
        areas(box.pid, ["/nowhere"])
    with pytest.raises(UsageError, match="/ed/sub"):
        (shared / "sub").mkdir()
        areas(box.pid, ["/ed/sub"])


def test_a_root_that_is_no_overlay_is_refused() -> None:
    with pytest.raises(Unsupported, match="overlay"):
        areas(os.getpid())


def test_room_is_what_the_new_container_has(boxes: Callable[..., Box]) -> None:
    box = boxes(shm="8m").start()
    (box.root / "dev/shm/own").write_bytes(bytes(1 << 20))
    assert room(box.pid, "shm") == Room(free=7 << 20, total=8 << 20)
    require_room(box.pid, "shm", 7 << 20)
    with pytest.raises(ResourceShort, match=r"/dev/shm .* 7 MiB free of 8 MiB, the checkpoint holds 9 MiB"):
        require_room(box.pid, "shm", (8 << 20) + 1)


def test_a_read_only_root_has_no_layer_to_carry(boxes: Callable[..., Box]) -> None:
    box = boxes().start()
    subprocess.run([sys.executable, "-c", REMOUNT, str(box.pid)], check=True)
    assert [area.name for area in areas(box.pid)] == ["shm"]
