"""The hard links that CRIU makes for open files whose name is gone while the file has another (link remaps).

A semaphore of sem_open lives so: made under a passing name, linked to its own, mapped. CRIU links it as `link_remap.N`
beside the old name, and a restore opens that. But a dump with --leave-running, ours, removes the links when it ends,
before the files are read. So a capture writes them into its stream as if they were there: this says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from stasis.agent.criu_images import ImageCodec
from stasis.errors import CheckpointFailed

LINKED = 0  # remap_type
FILE_MAPPING = (1 << 6) | (1 << 7)  # VMA_FILE_PRIVATE | VMA_FILE_SHARED


def links(
    codec: ImageCodec, names: Iterable[str], read: Callable[[str], bytes], processes: Mapping[int, int]
) -> dict[str, str]:
    """Of each link remap of a dump: its path in the container, and the path in the host's /proc of a descriptor or
    mapping of the frozen tree that holds the file. `names` are the dump's images, `read` gives one's bytes; `processes`
    has the host's pid of each pid inside. CheckpointFailed: no process holds the file."""
    names = set(names)
    if "remap-fpath.img" not in names:
        return {}
    remaps = codec.load("remap-fpath.img", read("remap-fpath.img")).messages
    wanted = {remap.orig_id: remap.remap_id for remap in remaps if remap.remap_type == LINKED}
    if not wanted:
        return {}
    files = codec.load("files.img", read("files.img")).messages
    paths = {file.reg.id: "/" + file.reg.name.lstrip("/") for file in files if file.HasField("reg")}
    held: dict[int, str] = {}
    for name in sorted(names):
        kind, _, number = name.removesuffix(".img").partition("-")
        if kind == "mm" and (pid := processes.get(int(number))):
            for vma in codec.load(name, read(name)).messages[0].vmas:
                if vma.status & FILE_MAPPING:
                    held[vma.shmid] = f"/proc/{pid}/map_files/{vma.start:x}-{vma.end:x}"
        elif kind == "ids" and (pid := processes.get(int(number))):
            table = f"fdinfo-{codec.load(name, read(name)).messages[0].files_id}.img"
            if table in names:
                for entry in codec.load(table, read(table)).messages:
                    held[entry.id] = f"/proc/{pid}/fd/{entry.fd}"
    if lost := [paths.get(remap, str(remap)) for file, remap in wanted.items() if file not in held]:
        raise CheckpointFailed(f"CRIU linked open files as {', '.join(lost)}, and no process is seen to hold them")
    return {paths[remap]: held[file] for file, remap in wanted.items()}
