"""Files on volumes that are not carried (PVCs, config maps): what a checkpoint notes of them and a restore compares.

Their content is not in a checkpoint. A training that reads a data set does not care; one that appends to a log there
finds what was written after the checkpoint still in it. So a difference is told as an event, and CRIU's own check of
their sizes is left out for the mounts named here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass

from stasis.agent.files.beneath import CHANGED, IN_ROOT, NO_MAGICLINKS, opened
from stasis.agent.files.mounts import Mount, mounts

# No files to compare: the kernel's own, and what a runtime sets up anew in each container.
NOT_VOLUMES = frozenset(
    "bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fusectl hugetlbfs mqueue nsfs proc pstore securityfs "
    "sysfs tracefs".split()
)
DELETED = " (deleted)"


@dataclass(frozen=True)
class VolumeFile:
    """A regular file on a volume that was open or mapped: its path in the container, bytes, and mtime in ns."""

    path: str
    size: int
    mtime: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """What has become of a file since; `now` is None where it is gone."""

    was: VolumeFile
    now: VolumeFile | None

    def __str__(self) -> str:
        if self.now is None:
            return f"{self.was.path} was open at the checkpoint and is gone"
        if self.now.size != self.was.size:
            return f"{self.was.path} had {self.was.size} bytes at the checkpoint and has {self.now.size}"
        return f"{self.was.path} was written to since the checkpoint (same size)"


def volume_points(pid1: int, carried: Collection[str]) -> frozenset[str]:
    """Mount points of the container whose files are not in a checkpoint. `carried` names those of the areas that are.
    The root counts as carried, /dev and what the kernel shows as no volume."""
    return frozenset(mount.point for mount in _volumes(mounts(pid1), carried))


def open_files(pid1: int, pids: Iterable[int], carried: Collection[str]) -> list[VolumeFile]:
    """The regular files on such volumes that these processes (of the host's numbering) hold open or mapped, by path.
    Unlinked ones are left out: CRIU carries them. A process that is gone has none."""
    table = mounts(pid1)
    points = {mount.id: mount.point for mount in _volumes(table, carried)}
    found: dict[str, VolumeFile] = {}
    for pid in pids:
        for link in (*_descriptors(pid, points), *_mappings(pid, table, points)):
            try:
                path, status = os.readlink(link), os.stat(link)
            except OSError:  # closed or gone meanwhile
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink and not path.endswith(DELETED) and not _made_anew(path):
                found[path] = VolumeFile(path, status.st_size, status.st_mtime_ns)
    return [found[path] for path in sorted(found)]


def _made_anew(path: str) -> bool:
    """Files of config maps, secrets and projections: kubelet writes them for each pod, below `..` and a time
    (k8s.io/kubernetes pkg/volume/util/atomic_writer.go)."""
    return any(part.startswith("..") and len(part) > len("..") for part in path.split("/"))


def differences(pid1: int, files: Iterable[VolumeFile]) -> list[Difference]:
    """Compare with what the new container's mounts show. Symlinks are followed, but not out of the container."""
    root = os.open(f"/proc/{pid1}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = ((was, _now(root, was.path)) for was in files)
        return [Difference(was, now) for was, now in found if now != was]
    finally:
        os.close(root)


def _now(root: int, path: str) -> VolumeFile | None:
    try:
        with opened(root, path, os.O_PATH, resolve=IN_ROOT | NO_MAGICLINKS) as fd:
            status = os.fstat(fd)
    except OSError as error:
        if error.errno not in CHANGED:
            raise
        return None
    return VolumeFile(path, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _volumes(table: Iterable[Mount], carried: Collection[str]) -> Iterator[Mount]:
    for mount in table:
        dev = mount.point == "/dev" or (mount.point.startswith("/dev/") and mount.point != "/dev/shm")
        if mount.point not in ("/", *carried) and not dev and mount.kind not in NOT_VOLUMES:
            yield mount


def _descriptors(pid: int, points: Collection[int]) -> Iterator[str]:
    """Paths of the magic links of open files on these mounts."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for fd in descriptors:
        try:
            with open(f"/proc/{pid}/fdinfo/{fd}") as lines:
                mount = next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), -1)
        except OSError:
            continue
        if mount in points:
            yield f"/proc/{pid}/fd/{fd}"


def _mappings(pid: int, table: Collection[Mount], points: Collection[int]) -> Iterator[str]:
    """Paths of the magic links of mapped files whose longest mount point is one of these mounts'."""
    ids = {mount.point: mount.id for mount in table}  # the last one mounted at a point counts
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
            found = [line.split(maxsplit=5) for line in lines]
    except OSError:
        return
    for fields in found:
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        folder = fields[5].rstrip("\n")
        while folder not in ids and folder:
            folder = folder.rpartition("/")[0]
        if ids.get(folder or "/") in points:
            start, _, end = fields[0].partition("-")
            yield f"/proc/{pid}/map_files/{start.lstrip('0')}-{end.lstrip('0')}"
