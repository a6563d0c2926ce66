"""Where the pieces are that the project builds once: CRIU's bundle, init, the training root file system.

Each lies in the cache under a name that holds the digest of its pins (tools/lib.sh), so several builds may be there;
the newest counts, unless the environment names one.
"""

from __future__ import annotations

import os
from pathlib import Path

from stasis.errors import Unsupported


def cache() -> Path:
    """$STASIS_CACHE, or `stasis` in the user's cache folder."""
    if given := os.environ.get("STASIS_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stasis"


def criu() -> Path:
    """The bundle's folder."""
    return _find("STASIS_CRIU", "criu-*", "criu", "tools/criu.sh").parent


def init() -> Path:
    """The static binary; the name of its folder holds the build's digest."""
    return _find("STASIS_INIT", "init-*", "init", "tools/init.sh")


def init_builds() -> dict[str, Path]:
    """All builds of init that are here, by their digests: a tree is restored with the one it was under."""
    return {build_of(path): path for path in (*cache().glob("init-*/init"), init())}


def build_of(path: Path) -> str:
    """The digest of a build of init, by the folder that it lies in: `init-VERSION-DIGEST`, or in a pod `DIGEST`."""
    return path.parent.name.rpartition("-")[2]


def rootfs() -> Path:
    """The root folder of the demo's and the tests' containers."""
    return _find("STASIS_ROOTFS", "rootfs-trixie-*", "usr", "tools/rootfs.sh").parent


def _find(variable: str, pattern: str, piece: str, maker: str) -> Path:
    if given := os.environ.get(variable):
        path = Path(given)
        return path if path.is_file() else path / piece
    found = [path for path in cache().glob(f"{pattern}/{piece}") if not path.parent.name.endswith(".part")]
    if not found:
        raise Unsupported(f"{pattern} is not in {cache()}", remedy=f"run {maker}, or set {variable}")
    return max(found, key=lambda path: path.parent.stat().st_mtime)
