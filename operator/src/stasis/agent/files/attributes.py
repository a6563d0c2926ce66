"""Owner, mode, time and extended attributes of a file, read and set through a descriptor."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from stasis.agent.files.beneath import link_of

# Not carried: security.selinux and the like, which belong to the new container's own label.
CARRIED = ("user.", "trusted.", "security.capability", "system.posix_acl_access", "system.posix_acl_default")


@dataclass(frozen=True)
class Attributes:
    """`mode` has the permission bits with setuid, setgid and sticky; `mtime` is in ns since the epoch."""

    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    xattrs: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, fd: int) -> "Attributes":
        status = os.fstat(fd)
        return cls(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, read_xattrs(fd))


def read_xattrs(fd: int) -> dict[str, bytes]:
    """The extended attributes that are carried, by name; overlayfs's own among them where there are some."""
    path = link_of(fd)
    names = (name for name in sorted(os.listxattr(path)) if name.startswith(CARRIED))
    return {name: os.getxattr(path, name) for name in names}


def apply(fd: int, wanted: Attributes) -> None:
    """Make the file's attributes exactly these. Call it last: writing and linking change times, chown drops setuid and
    file capabilities. What a default ACL of the folder gave to a new file goes."""
    path, status = link_of(fd), os.fstat(fd)
    if (status.st_uid, status.st_gid) != (wanted.uid, wanted.gid):
        os.chown(path, wanted.uid, wanted.gid)
    for name in read_xattrs(fd).keys() - wanted.xattrs.keys():
        os.removexattr(path, name)
    for name, value in wanted.xattrs.items():
        os.setxattr(path, name, value)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(path, wanted.mode)
    os.utime(path, ns=(wanted.mtime, wanted.mtime))
