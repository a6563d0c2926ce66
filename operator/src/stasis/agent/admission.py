"""May this checkpoint be restored into this placeholder? Asked before anything of it runs, or is laid.

Not more rights than the container has, a machine that the processes can run on, room for all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stasis.agent import credentials, fingerprint, provision
from stasis.agent.files.areas import areas, point_of, require_room
from stasis.agent.files.volumes import VolumeFile, differences
from stasis.agent.room import container_room
from stasis.agent.volume import VOLUME, put_into_volume
from stasis.core import capacity
from stasis.core import credentials as rights
from stasis.core import fingerprint as machines
from stasis.core.rankconfig import RankConfig
from stasis.errors import Corrupt, Finding, Refused, RestoreFailed

_BUILD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a folder of our volume


def admit(pid1: int, config: RankConfig, bundle: Path) -> list[str]:
    """Raises Refused, ResourceShort or RestoreFailed; returns how the machine differs where it is no matter."""
    saved = machines.Fingerprint.from_dict(config.fingerprint)
    # The build of init that the tree was under is brought below, and the image is compared by who starts the container.
    here = replace(fingerprint.read(bundle, pid1), init=saved.init, image=saved.image)
    comparison = machines.compare(saved, here)
    if comparison.refusals:
        raise Refused(comparison.refusals)
    huge = {int(size): count for size, count in config.huge_pages.items()}
    capacity.require_container(
        container_room(pid1), memory=config.sizes.get("memory", 0), threads=config.threads, huge_pages=huge
    )
    for area, size in config.areas.items():
        require_room(pid1, area, size)
    return list(comparison.warnings)


def changed_on_volumes(pid1: int, config: RankConfig) -> list[str]:
    """Files on volumes that the processes had open, and that are others now."""
    return [str(difference) for difference in differences(pid1, _open_on_volumes(config))]


def require_areas(pid1: int, config: RankConfig, volumes: Sequence[str]) -> None:
    """Files are laid where a checkpoint of this container would take them from, and nowhere else. Raises Refused."""
    here = {area.name for area in areas(pid1, volumes)}
    if extra := [point_of(area) for area in config.areas if area not in here]:
        remedy = "give the new container the emptyDirs that the old one had"
        raise Refused([Finding("it holds files for it, and the new container has none there", remedy, where=extra[0])])


def require_rights(pid1: int, tasks: Iterable[rights.Credentials]) -> None:
    """Every task of the images may have what its container may have, and no more. Raises Refused."""
    if findings := rights.exceeding(tasks, credentials.of_process(pid1)):
        raise Refused(findings)


def require_restored_rights(pid1: int, pids: Iterable[int]) -> None:
    """The same of restored processes that stand still, whatever their images said and to whom: what CRIU and the
    kernel made of them counts. Filters are taken to be those of the images."""
    allowed = credentials.of_process(pid1)
    tasks = (replace(task, filters=allowed.filters) for task in credentials.of_threads(pids))
    if findings := rights.exceeding(tasks, allowed):
        raise Refused(findings)


def bring_init(pid1: int, config: RankConfig, saved: Callable[[], bytes]) -> None:
    """The tree was under one build of init, and its keeper maps that very file: have it in our volume. It is this
    node's, or, after an update of Stasis, `saved` with the checkpoint."""
    build = Path(config.init).parent.name
    if Path(config.init) != Path("/", VOLUME, build, "init") or not _BUILD.fullmatch(build):
        raise RestoreFailed(f"the checkpoint's keeper is {config.init}, which is no init of ours")
    here = provision.init_builds().get(provision.build_of(Path(config.init)))
    put_into_volume(pid1, build, "init", here.read_bytes() if here else saved())


def _open_on_volumes(config: RankConfig) -> list[VolumeFile]:
    try:
        return [VolumeFile(**file) for file in config.open_on_volumes]
    except TypeError as error:
        raise Corrupt(f"the config of rank {config.rank} holds a file on a volume that is none: {error}") from None
