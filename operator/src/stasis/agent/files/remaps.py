"""The hard links that CRIU makes for open files whose name is gone while the file has another (link remaps).

A semaphore of sem_open lives so: made under a passing name, linked to its own, mapped. CRIU links it as
`link_remap.N` beside the old name and a restore opens that. But a dump with --leave-running, ours, removes the links
when it ends, before the files can be read; so they are made again from the frozen processes, for the time of a capture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from stasis.agent.criu_images import Image
from stasis.agent.files.beneath import IN_ROOT, NO_MAGICLINKS, NO_SYMLINKS, opened
from stasis.errors import CheckpointFailed

LINKED = 0  # remap_type
FILE_MAPPING = (1 << 6) | (1 << 7)  # VMA_FILE_PRIVATE | VMA_FILE_SHARED


@dataclass(frozen=True)
class LinkRemap:
    """`path` in the container is to be a hard link to what the process `pid` (inside) has at `held` of its /proc."""

    path: str
    pid: int
    held: str


def link_remaps(images: Mapping[str, Image]) -> list[LinkRemap]:
    """From a dump's images, by name: remap-fpath.img, files.img, and of each process mm-, ids- and fdinfo-.

    CheckpointFailed: no process holds the file of a remap by a descriptor or a mapping.
    """
    if "remap-fpath.img" not in images:
        return []
    wanted = {m.orig_id: m.remap_id for m in images["remap-fpath.img"].messages if m.remap_type == LINKED}
    paths = {m.reg.id: m.reg.name for m in images["files.img"].messages if m.HasField("reg")} if wanted else {}
    held = _held(images, wanted) if wanted else {}
    found = []
    for file, remap in wanted.items():
        path = paths.get(remap)
        if path is None or file not in held:
            raise CheckpointFailed(f"CRIU linked an open file as {path or remap}, and no process is seen to hold it")
        found.append(LinkRemap("/" + path.lstrip("/"), *held[file]))
    return found


@contextmanager
def linked(pid1: int, remaps: Sequence[LinkRemap], processes: Mapping[int, int]) -> Iterator[None]:
    """The links are there within the with statement: capture then. `processes` gives the host's pid of each pid inside.
    A link that a killed agent left is made anew. CheckpointFailed: one cannot be made."""
    with ExitStack() as stack:
        root = os.open(f"/proc/{pid1}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, root)
        for remap in remaps:
            folder, _, name = remap.path.rpartition("/")
            flags = os.O_PATH | os.O_DIRECTORY
            try:
                fd = stack.enter_context(opened(root, folder, flags, resolve=IN_ROOT | NO_MAGICLINKS | NO_SYMLINKS))
                _unlink(name, fd)
                held = f"/proc/{processes[remap.pid]}/{remap.held}"
                os.link(held, name, dst_dir_fd=fd, follow_symlinks=True)
            except (OSError, KeyError) as error:
                raise CheckpointFailed(f"{remap.path} cannot be linked again: {error}") from error
            stack.callback(_unlink, name, fd)
        yield


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _held(images: Mapping[str, Image], wanted: Mapping[int, int]) -> dict[int, tuple[int, str]]:
    """Of each wanted file id: a process inside, and where below its /proc the file is held."""
    held: dict[int, tuple[int, str]] = {}
    tables = {
        images[name].messages[0].files_id: int(name[len("ids-") : -len(".img")])
        for name in images
        if name.startswith("ids-")
    }
    for name, image in images.items():
        kind, _, number = name.removesuffix(".img").partition("-")
        if kind == "mm":
            for vma in image.messages[0].vmas:
                if vma.status & FILE_MAPPING and vma.shmid in wanted:
                    held[vma.shmid] = (int(number), f"map_files/{vma.start:x}-{vma.end:x}")
        elif kind == "fdinfo" and int(number) in tables:
            for entry in image.messages:
                if entry.id in wanted:
                    held.setdefault(entry.id, (tables[int(number)], f"fd/{entry.fd}"))
    return held
