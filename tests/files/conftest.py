"""Small containers for tests of files: a process with a mount namespace and an overlay root of its own, no runtime."""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Mounts and then waits, in one process: its root needs no program of its own.
INIT = """
import ctypes, mmap, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def must(result):
    if result: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def mount(source, target, kind, flags=0, data=""):
    must(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()))
held = []
root, options, opened, *rest = sys.argv[1:]
opened = opened.split()
must(libc.unshare(0x20000))  # CLONE_NEWNS
mount("none", "/", "", 0x4000 | 0x40000)  # MS_REC | MS_PRIVATE
mount("overlay", root, "overlay", 0, options)
while rest:
    kind, source, target, *rest = rest
    mount(source, root + target, "tmpfs" if kind == "tmpfs" else "", 0 if kind == "tmpfs" else 4096,
          "mode=1777,size=" + source if kind == "tmpfs" else "")
    if kind == "ro": mount("none", root + target, "", 4096 | 32 | 1)  # MS_BIND | MS_REMOUNT | MS_RDONLY
os.chdir(root)
must(libc.syscall(155 if os.uname().machine == "x86_64" else 41, b".", b"."))  # pivot_root
must(libc.umount2(b".", 2))  # MNT_DETACH
os.chdir("/")
if opened[-1:] == ["mmap"]:
    with open(opened[0], "rb+") as file: held.append(mmap.mmap(file.fileno(), 0))
    os.closerange(3, 10)  # of the mapping
else: held += [open(path, "rb+") for path in opened]
print(flush=True)
signal.pause()
"""


class Box:
    """A container's files: `root` shows what it sees. Mounts: /dev/shm (a tmpfs), /stasis, and the given volumes."""

    def __init__(self, folder: Path, lower: Path, *, shm: str = "64m", options: str = "") -> None:
        self.folder, self.upper, self.work = folder, folder / "upper", folder / "work"
        self._lower, self._shm, self._options = lower, shm, options
        self._mounts: list[str] = []
        for path in (self.upper, self.work, folder / "rootfs"):
            path.mkdir(parents=True)
        self.volume("/stasis")

    def volume(self, point: str, kind: str = "bind", source: Path | None = None) -> Path:
        """Mount a folder of the host before the start; kind "ro": read-only."""
        source = source or self.folder / ("volume" + point.replace("/", "_"))
        source.mkdir(exist_ok=True)
        self._mounts += [kind, str(source), point]
        return source

    def start(self, *opened: str) -> "Box":
        """Start it; its process holds these files open, or the one before "mmap" mapped."""
        for point in [*self._mounts[2::3], "/dev/shm"]:  # as a runtime does: mount points are made in the layer
            if not (self._lower / point.lstrip("/")).exists():
                (self.upper / point.lstrip("/")).mkdir(parents=True, exist_ok=True)
        overlay = f"lowerdir={self._lower},upperdir={self.upper},workdir={self.work}{self._options}"
        arguments = [
            str(self.folder / "rootfs"),
            overlay,
            " ".join(opened),
            "tmpfs",
            self._shm,
            "/dev/shm",
            *self._mounts,
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", INIT, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "\n"
        self.pid = self._process.pid
        self.root = Path(f"/proc/{self.pid}/root")
        return self

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    """The image: a few folders and files."""
    image = tmp_path / "image"
    for name in ("etc", "opt/app/data", "var/log", "dev/shm", "tmp"):
        (image / name).mkdir(parents=True)
    for name in ("etc/hosts", "etc/passwd", "opt/app/main.py", "opt/app/data/a", "opt/app/data/b", "var/log/boot.log"):
        (image / name).write_text(f"image's {name}\n")
    os.symlink("var/log", image / "logs")
    return image


@pytest.fixture
def boxes(tmp_path: Path, lower: Path) -> Iterator[Callable[..., Box]]:
    """Make a box (not started); all that were started are stopped in the end."""
    made: list[Box] = []

    def make(**options: str) -> Box:
        made.append(Box(tmp_path / f"box{len(made)}", lower, **options))
        return made[-1]

    yield make
    for box in made:
        if hasattr(box, "pid"):
            box.stop()


def seen(top: Path, *, times: bool = True) -> dict[str, tuple[object, ...]]:
    """All that can be seen of each name below a folder, on its file system: type, mode, owner, mtime, xattrs, content,
    and the first of its names."""
    first: dict[tuple[int, int], str] = {}
    found: dict[str, tuple[object, ...]] = {}
    device = os.stat(top).st_dev

    def look(path: str, name: str) -> None:
        status = os.lstat(path)
        if status.st_dev != device and stat.S_ISDIR(status.st_mode):
            return
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest() if status.st_size < 1 << 26 else None
        xattrs = {n: os.getxattr(path, n, follow_symlinks=False) for n in os.listxattr(path, follow_symlinks=False)}
        links = None if stat.S_ISDIR(status.st_mode) else first.setdefault((status.st_dev, status.st_ino), name)
        size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        when = status.st_mtime_ns if times else None
        found[name] = (oct(status.st_mode), status.st_uid, status.st_gid, when, size, content, links, xattrs)
        if stat.S_ISDIR(status.st_mode):
            for entry in sorted(os.listdir(path)):
                look(f"{path}/{entry}", f"{name}/{entry}".lstrip("/"))

    look(f"{top}/.", "")
    return found


def empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
