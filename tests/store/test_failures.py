"""What fails in mid-write leaves nothing that could be taken for whole, and the next checkpoint works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from stasis.errors import NoSpace, ParentLost, UsageError
from stasis.store.checkpoint import list_checkpoints, publish, remove, verify
from stasis.store.layout import LayoutRepository
from stasis.store.media import PACK, Buffer, Descriptor
from stasis.store.reader import RankReader
from stasis.store.writer import RankWriter, StoreOptions

MIB = 1 << 20
SMALL_PACKS = StoreOptions(pack_bytes=MIB, workers=2)


def noise(seed: int, mib: int) -> bytes:
    return np.random.default_rng(seed).bytes(mib * MIB)


def blobs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blobs" / "sha256").iterdir()}


def write(folder: Path, data: bytes, tag: str) -> None:
    repo = LayoutRepository(folder)
    writer = RankWriter(repo, uid=f"uid-{tag}", rank=0, options=SMALL_PACKS)
    writer.put("pages-1.img", data)
    publish(repo, tag, f"uid-{tag}", [writer.finish({}).manifest], {})


WRITE_AND_DIE = """
import os, signal, sys
import numpy as np
from pathlib import Path
from stasis.store.layout import LayoutRepository
from stasis.store.writer import RankWriter, StoreOptions
done = 0
def progress(count):
    global done
    done += count
    if done >= int(sys.argv[2]) << 20:
        os.kill(os.getpid(), signal.SIGKILL)
writer = RankWriter(LayoutRepository(Path(sys.argv[1])), uid="uid-2", rank=0, progress=progress,
                    options=StoreOptions(pack_bytes=1 << 20, workers=2))
writer.put("pages-1.img", np.random.default_rng(5).bytes(24 << 20))
writer.finish({})
"""


@pytest.mark.parametrize("at", [4, 12, 20])
def test_a_writer_killed_at_any_time_leaves_the_folder_usable(tmp_path: Path, at: int) -> None:
    write(tmp_path, noise(1, 2), "one")
    before = blobs(tmp_path)
    done = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(tmp_path), str(at)], env=with_package())
    assert done.returncode == -signal.SIGKILL
    assert [found.tag for found in list_checkpoints(tmp_path)] == ["one"]
    verify(f"{tmp_path}:one")
    LayoutRepository(tmp_path).sweep()
    assert blobs(tmp_path) == before
    assert list((tmp_path / ".stasis" / "ingest").iterdir()) == []
    write(tmp_path, noise(5, 24), "two")
    verify(f"{tmp_path}:two")


def with_package() -> dict[str, str]:
    import stasis

    return {**os.environ, "PYTHONPATH": str(Path(stasis.__file__).parents[1])}


def test_an_aborted_writer_leaves_nothing_visible_and_no_threads(tmp_path: Path) -> None:
    threads = threading.active_count()
    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=0, options=SMALL_PACKS)
    writer.put("pages-1.img", noise(1, 9))
    writer.abort()
    writer.abort()
    assert threading.active_count() == threads
    with pytest.raises(UsageError):
        writer.put("more", b"")
    with pytest.raises(UsageError):
        writer.finish({})
    repo.sweep()
    assert blobs(tmp_path) == set()


def test_a_stream_that_breaks_off_fails_the_checkpoint(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield noise(1, 9)
        raise OSError("criu died")

    writer = RankWriter(LayoutRepository(tmp_path), uid="uid", rank=0, options=SMALL_PACKS)
    writer.put("inventory.img", b"whole")
    with pytest.raises(OSError, match="criu died"):
        writer.add("pages-1.img", broken())
    with pytest.raises(OSError, match="criu died"):
        writer.finish({})
    assert list_checkpoints(tmp_path) == []


class Full(LayoutRepository):
    """A folder whose third pack finds no room, as a disk that fills up."""

    packs = 0

    def push(self, descriptor: Descriptor, buffers: Sequence[Buffer]) -> bool:
        if descriptor.media_type == PACK:
            self.packs += 1
            if self.packs >= 3:
                raise NoSpace("full")
        return super().push(descriptor, buffers)


def test_an_error_of_the_repository_reaches_those_who_wait(tmp_path: Path) -> None:
    options = StoreOptions(memory_bytes=96 * MIB, pack_bytes=MIB, workers=2, uploads=1)
    writer = RankWriter(Full(tmp_path), uid="uid", rank=0, options=options)
    errors: list[BaseException] = []

    def add(number: int) -> None:
        try:
            writer.add(f"s{number}", (noise(number * 100 + n, 1) for n in range(60)))
        except NoSpace as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    with pytest.raises(NoSpace):
        writer.finish({})


def test_the_disk_budget_is_kept(tmp_path: Path) -> None:
    repo = LayoutRepository(tmp_path, budget_bytes=6 * MIB)
    writer = RankWriter(repo, uid="uid", rank=0, options=SMALL_PACKS)
    with pytest.raises(NoSpace, match="do not fit"):
        writer.put("pages-1.img", noise(1, 20))
        writer.finish({})
    writer.abort()
    used = sum(path.stat().st_size for path in (tmp_path / "blobs" / "sha256").iterdir())
    assert used <= 6 * MIB
    repo.sweep()
    write(tmp_path, noise(2, 2), "small")
    verify(f"{tmp_path}:small")


@pytest.mark.root
def test_a_full_disk_is_named_and_can_be_repeated(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    try:
        write(disk, noise(1, 2), "one")
        with pytest.raises(NoSpace):
            write(disk, noise(2, 12), "two")
        assert [found.tag for found in list_checkpoints(disk)] == ["one"]
        LayoutRepository(disk).sweep()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        write(disk, noise(2, 12), "two")
        verify(f"{disk}:one")
        verify(f"{disk}:two")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_secrets_are_for_their_owner_only(tmp_path: Path) -> None:
    write(tmp_path / "store", noise(1, 2), "one")
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_sweep_spares_what_is_being_written_and_what_waits_for_its_commit(tmp_path: Path) -> None:
    repo = LayoutRepository(tmp_path)
    writer = RankWriter(repo, uid="uid", rank=0, options=SMALL_PACKS)
    writer.put("pages-1.img", noise(1, 5))
    write(tmp_path, noise(2, 2), "other")
    remove(f"{tmp_path}:other")  # sweeps, or would
    rank = writer.finish({}).manifest
    repo.sweep()
    publish(repo, "late", "uid", [rank], {})
    assert verify(f"{tmp_path}:late") > 5 * MIB


def test_packs_shared_with_a_child_outlive_the_parent(tmp_path: Path) -> None:
    repo, data = LayoutRepository(tmp_path), noise(1, 5)
    write(tmp_path, data, "one")
    digest = repo.get_manifest("one").children[0]
    writer = RankWriter(repo, uid="uid-2", rank=0, parent=RankReader(repo, digest))
    writer.put("pages-1.img", data)
    result = writer.finish({})
    assert result.stats.stored == 0
    publish(repo, "two", "uid-2", [result.manifest], {})
    remove(f"{tmp_path}:one")
    assert verify(f"{tmp_path}:two") > 5 * MIB


def test_a_parent_that_vanishes_meanwhile_is_noticed(tmp_path: Path) -> None:
    repo, data = LayoutRepository(tmp_path), noise(1, 3)
    write(tmp_path, data, "one")
    parent = RankReader(repo, repo.get_manifest("one").children[0])
    writer = RankWriter(repo, uid="uid-2", rank=0, parent=parent)
    writer.put("pages-1.img", data)
    lost = parent.index.pack_digest(0)
    (tmp_path / "blobs" / lost.replace(":", "/")).unlink()
    with pytest.raises(ParentLost, match=lost):
        writer.finish({})
    assert ParentLost.retryable
    write(tmp_path, data, "two")
    verify(f"{tmp_path}:two")


def test_processes_that_publish_at_once_lose_no_tag(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stasis.store.layout import LayoutRepository\n"
        "from stasis.store.writer import RankWriter; from stasis.store.checkpoint import publish\n"
        "repo = LayoutRepository(Path(sys.argv[1]))\n"
        "for n in range(5):\n"
        "    uid = f'{sys.argv[2]}-{n}'\n"
        "    writer = RankWriter(repo, uid=uid, rank=0); writer.put('log', uid.encode())\n"
        "    publish(repo, uid, uid, [writer.finish({}).manifest], {})\n"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name], env=with_package()) for name in "abc"]
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert [found.tag for found in list_checkpoints(tmp_path)] == [f"{a}-{n}" for a in "abc" for n in range(5)]


MEASURE = """
import os, resource, sys
from pathlib import Path
import numpy as np
from stasis.store.layout import LayoutRepository
from stasis.store.reader import RankReader
from stasis.store.writer import RankWriter, StoreOptions
MIB = 1 << 20
block = np.random.default_rng(0).integers(0, 256, 64 * MIB, dtype=np.uint8)
repo, sink = LayoutRepository(Path(sys.argv[1])), os.open(os.devnull, os.O_WRONLY)
def pieces():
    for n in range(int(sys.argv[2]) // 64):
        block[:] += np.uint8(1)
        for at in range(0, block.size, MIB):
            yield block[at : at + MIB].data
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024
before = peak()
writer = RankWriter(repo, uid="uid", rank=0, options=StoreOptions(memory_bytes=128 * MIB, workers=2, uploads=2))
writer.add("pages-1.img", pieces())
manifest = writer.finish({}).manifest
written = peak() - before
RankReader(repo, manifest).copy_to("pages-1.img", sink)
print(written, peak() - before)
"""


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), "768"], env=with_package(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    written, read = map(int, done.stdout.split())
    assert written < 128 + 32
    assert read < 128 + 32 + 250


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    folder = tmp_path / "spill"
    folder.mkdir()
    return folder


def test_packs_can_wait_in_unlinked_files(tmp_path: Path, spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    push: Callable[..., bool] = LayoutRepository.push

    def look(self: LayoutRepository, descriptor: Descriptor, buffers: Sequence[Buffer]) -> bool:
        seen.append(os.listdir(spill))
        return push(self, descriptor, buffers)

    monkeypatch.setattr(LayoutRepository, "push", look)
    repo, data = LayoutRepository(tmp_path / "store"), noise(1, 9)
    options = StoreOptions(pack_bytes=MIB, workers=2, spill_dir=spill)
    writer = RankWriter(repo, uid="uid", rank=0, options=options)
    writer.put("pages-1.img", data)
    reader = RankReader(repo, writer.finish({}).manifest)
    assert reader.read("pages-1.img", len(data)) == data
    assert len(seen) > 5
    assert not any(seen)
