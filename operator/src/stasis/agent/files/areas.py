"""Where a container writes: its overlay's upper layer, /dev/shm, the emptyDirs that the caller names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stasis.agent.files.beneath import IN_ROOT, NO_MAGICLINKS, NO_SYMLINKS, openat2, opened
from stasis.agent.files.mounts import Mount, Points, mount_id, mounts
from stasis.errors import ResourceShort, StasisError, Unsupported, UsageError

UPPER, SHM, EMPTYDIR = "upper", "shm", "emptydir:"
OURS = "/stasis"  # the volume that brings init into the container: of this pod alone, never carried
FOLDER = os.O_PATH | os.O_DIRECTORY


@dataclass(frozen=True)
class Area:
    """One part of a container's files. `name` is 'upper', 'shm' or 'emptydir:<mount point>'; `upper` is the folder on
    the host that holds the layer, `user_xattrs` says that overlayfs keeps its marks in user.overlay.* there."""

    name: str
    pid1: int
    point: str
    upper: str = ""
    user_xattrs: bool = False
    host: str = "/"

    @property
    def points(self) -> Points:
        """Mount points of the container inside this area."""
        return Points(mounts(self.pid1), self.point)

    @contextmanager
    def source(self) -> Iterator[int]:
        """The folder to read, as an O_PATH descriptor: the layer itself on the host, or the container's mount.

        The layer is looked up in the root of the host, where the runtime mounted it; symlinks are followed there
        (a node may keep its containers behind one), but not out of it."""
        if not self.upper:
            with area_root(self.pid1, self.name) as fd:
                yield fd
            return
        with _root(self.host) as host, opened(host, self.upper, FOLDER, resolve=IN_ROOT | NO_MAGICLINKS) as fd:
            yield fd


@dataclass(frozen=True)
class Room:
    """Bytes of the file system behind an area."""

    free: int
    total: int


def areas(pid1: int, volumes: Sequence[str] = (), *, host: str = "/") -> list[Area]:
    """What to carry of the container whose PID 1 is `pid1`: upper layer, /dev/shm where it is a mount, and the named
    mount points. Our own volume and read-only mounts (tokens, config maps) are left out though named, and of a volume
    that is mounted twice the first mount point stands for both.

    `host` is the root below which the runtime's folders are found ("/proc/1/root" for an agent that runs in a
    container of its own). UsageError: a named volume is no mount point.
    Unsupported: the root file system is no overlay of the container's own.
    """
    table = mounts(pid1)
    found = [*_layer(pid1, table, host)]
    shm = _at(table, "/dev/shm")
    if shm and shm.writable:
        found.append(Area(SHM, pid1, "/dev/shm"))
    seen = {_identity(area) for area in found if area.name == SHM}
    for volume in volumes:
        mount = _named(pid1, table, volume)
        if mount.point == OURS or not mount.writable:
            continue
        area = Area(SHM if mount.point == "/dev/shm" else EMPTYDIR + mount.point, pid1, mount.point)
        if (identity := _identity(area)) not in seen:
            seen.add(identity)
            found.append(area)
    return found


def room(pid1: int, area: str) -> Room:
    """Free and total bytes of the file system that an area of the new container is on."""
    with area_root(pid1, area) as fd:
        return room_at(fd)


def room_at(fd: int) -> Room:
    """Of the file system that a descriptor is on."""
    space = os.fstatvfs(fd)
    return Room(space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)


def require_room(pid1: int, area: str, need: int) -> None:
    """ResourceShort with both sizes where `need` bytes do not fit; checked before anything is laid."""
    have = room(pid1, area)
    if need > have.free:
        raise ResourceShort(
            f"{point_of(area)} of the new container has {have.free >> 20} MiB free of {have.total >> 20} MiB, "
            f"the checkpoint holds {-(-need >> 20)} MiB of files for it",
            remedy="give the new container as much room there as the old one had",
        )


def point_of(area: str) -> str:
    """The mount point of an area, by its name. UsageError: no such kind of area."""
    if area == UPPER:
        return "/"
    if area == SHM:
        return "/dev/shm"
    point = area.removeprefix(EMPTYDIR)
    if point == area or not point.startswith("/") or point != os.path.normpath(point):
        raise UsageError(f"{area!r} is no area of a container")
    return point


@contextmanager
def area_root(pid1: int, area: str) -> Iterator[int]:
    """The root of an area as the container sees it, as an O_PATH descriptor. StasisError: nothing is mounted there."""
    point = point_of(area)
    with _root(f"/proc/{pid1}/root") as root:
        try:
            fd = openat2(root, point, FOLDER, resolve=IN_ROOT | NO_MAGICLINKS | NO_SYMLINKS)
        except OSError as missing:
            raise StasisError(f"the container has no folder {point}") from missing
    try:
        if point != "/" and not any(m.id == mount_id(fd) and m.point == point for m in mounts(pid1)):
            raise StasisError(f"the container has no mount at {point}")
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _root(path: str) -> Iterator[int]:
    try:
        fd = os.open(path, FOLDER | os.O_CLOEXEC)
    except FileNotFoundError as gone:
        raise StasisError(f"there is no {path}: the process is gone") from gone
    try:
        yield fd
    finally:
        os.close(fd)


def _at(table: Sequence[Mount], point: str) -> Mount | None:
    return next((mount for mount in reversed(table) if mount.point == point), None)


def _layer(pid1: int, table: Sequence[Mount], host: str) -> Iterator[Area]:
    root = _at(table, "/")
    if root is None or root.kind != "overlay" or root.root != "/":
        kind = root.kind if root else "none"
        raise Unsupported(
            f"the root file system of process {pid1} is no overlay of its own ({kind})",
            remedy="use the runtime's overlayfs snapshotter",
        )
    upper = root.option("upperdir")
    if upper is None or not root.writable:
        return  # nothing can be written there
    if not upper.startswith("/"):
        raise Unsupported(f"the upper layer of process {pid1} is given by a relative path ({upper})")
    yield Area(UPPER, pid1, "/", upper, "userxattr" in root.super_options, host)


def _named(pid1: int, table: Sequence[Mount], volume: str) -> Mount:
    """The mount that a path of the pod's specification means; it may lead there over symlinks of the image."""
    with _root(f"/proc/{pid1}/root") as root:
        try:
            with opened(root, volume, FOLDER, resolve=IN_ROOT | NO_MAGICLINKS) as fd:
                mount = next((m for m in table if m.id == mount_id(fd)), None)
                if mount:
                    with opened(root, mount.point, FOLDER, resolve=IN_ROOT | NO_MAGICLINKS) as top:
                        if os.path.samestat(os.fstat(fd), os.fstat(top)):
                            return mount
        except (FileNotFoundError, NotADirectoryError):
            pass
    raise UsageError(f"{volume} is no folder of the container that a volume is mounted on")


def _identity(area: Area) -> tuple[int, int]:
    with area.source() as fd:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
