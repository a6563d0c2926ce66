"""A file that is open under a name that is gone keeps a name for CRIU to open at the restore."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files.conftest import Box

from stasis.agent.criu_images import ImageCodec
from stasis.agent.files.capture import areas, capture
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import lay
from stasis.agent.files.remaps import links
from stasis.errors import CheckpointFailed

pytestmark = pytest.mark.root
TOOLS = Path(__file__).parents[2] / "tools"

# Holds one file by a mapping, as a semaphore is held, and one by a descriptor; both under names that are gone.
HOLDER = """
import mmap, os, sys
folder = sys.argv[1]
for name in ("sem.abc", "log.tmp"):
    with open(f"{folder}/{name}", "wb+") as file:
        file.write(bytes(4096))
os.mkdir(f"{folder}/later")
mapped = open(f"{folder}/sem.abc", "rb+")
held = mmap.mmap(mapped.fileno(), 0)
mapped.close()
log = os.open(f"{folder}/log.tmp", os.O_RDWR)
os.closerange(3, log)
os.link(f"{folder}/sem.abc", f"{folder}/sem.name")
os.link(f"{folder}/log.tmp", f"{folder}/later/log")
for name in ("sem.abc", "log.tmp"):
    os.unlink(f"{folder}/{name}")
print(os.getpid(), flush=True)
sys.stdin.read()
"""


class Holder:
    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", HOLDER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdout is not None
        self.pid = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_links_are_written_as_if_they_were_there(boxes: Callable[..., Box], tmp_path: Path) -> None:
    """In a layer the numbers of a file differ from those that the process sees; a folder may come after the file."""
    for point, name in (("tmp", "upper"), ("dev/shm", "shm")):
        old, new = boxes().start(), boxes().start()
        holder = Holder(old.root / point)
        try:
            maps = Path(f"/proc/{holder.pid}/maps").read_text().splitlines()
            mapping = next(line.split()[0] for line in maps if "sem." in line)
            wanted = {
                f"/{point}/link_remap.1": f"/proc/{holder.pid}/map_files/{mapping}",
                f"/{point}/later/link_remap.2": next(
                    str(fd) for fd in Path(f"/proc/{holder.pid}/fd").iterdir() if "log" in os.readlink(fd)
                ),
            }
            area = next(a for a in areas(old.pid) if a.name == name)
            other = "/dev/shm/other" if name == "upper" else "/tmp/other"
            content = b"".join(map(bytes, capture(area, {**wanted, other: "/proc/self/exe"})))
        finally:
            holder.stop()
        with LaidList(tmp_path / f"list-{name}") as record:
            lay(new.pid, name, io.BytesIO(content), record)
        laid = new.root / point
        assert (laid / "link_remap.1").samefile(laid / "sem.name")
        assert (laid / "later/link_remap.2").samefile(laid / "later/log")


def test_a_file_with_no_name_left_is_told(boxes: Callable[..., Box], tmp_path: Path) -> None:
    box = boxes().start()
    with pytest.raises(CheckpointFailed, match=r"link_remap\.7"):
        list(capture(areas(box.pid)[-1], {"/dev/shm/link_remap.7": "/proc/self/exe"}))


@pytest.fixture(scope="session")
def bundle() -> Path:
    return Path(subprocess.run([TOOLS / "criu.sh"], check=True, capture_output=True, text=True).stdout.strip())


@pytest.mark.criu
def test_the_links_of_a_dump_are_found_in_its_images(bundle: Path, tmp_path: Path) -> None:
    """And a dump that leaves the tree alive has removed them from the container."""
    (tmp_path / "images").mkdir()
    (tmp_path / "files").mkdir()
    holder = Holder(tmp_path / "files")
    try:
        program = [f"{bundle}/ld-linux-x86-64.so.2", "--library-path", str(bundle), f"{bundle}/criu"]
        options = ["--no-default-config", "--lib", f"{bundle}/lib", "--leave-running", "--link-remap", "-D"]
        subprocess.run(
            [*program, "dump", "-t", str(holder.pid), *options, str(tmp_path / "images"), "--external", "fd[0]"],
            check=True,
            capture_output=True,
        )
        found = links(
            ImageCodec(bundle / "images.desc"),
            os.listdir(tmp_path / "images"),
            lambda name: (tmp_path / "images" / name).read_bytes(),
            {holder.pid: holder.pid},
        )
        numbers = {(tmp_path / "files" / name).stat().st_ino for name in ("sem.name", "later/log")}
        assert {os.stat(held).st_ino for held in found.values()} == numbers
        assert all(path.startswith(f"{tmp_path}/files/link_remap.") for path in found)
        assert not list((tmp_path / "files").glob("link_remap.*"))
    finally:
        holder.stop()
