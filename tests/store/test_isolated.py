"""A restore reads through a process that has no privileges: what foreign bytes could do there is nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stasis.errors import Corrupt, NotFound, StoreError, UsageError
from stasis.store.isolated import IsolatedReader
from stasis.store.layout import LayoutRepository
from stasis.store.writer import RankWriter

pytestmark = pytest.mark.root

STREAMS = {f"s{number}": np.random.default_rng(number).bytes(number * 700_000) for number in range(6)}


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.getbasetemp() / "isolated")


@pytest.fixture
def reader(digest: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedReader]:
    with IsolatedReader(f"{tmp_path_factory.getbasetemp()}/isolated", digest) as reader:
        yield reader


def write(folder: Path) -> str:
    writer = RankWriter(LayoutRepository(folder), uid="uid", rank=3)
    for name, data in STREAMS.items():
        writer.put(name, data)
    return writer.finish({"a": {"b": [1, "ä"]}}).manifest.digest


def test_it_reads_as_the_reader_does(reader: IsolatedReader) -> None:
    assert (reader.uid, reader.rank, reader.config) == ("uid", 3, {"a": {"b": [1, "ä"]}})
    assert reader.names() == tuple(STREAMS)
    assert {name: reader.size(name) for name in STREAMS} == {name: len(data) for name, data in STREAMS.items()}
    assert {name: reader.read(name, 1 << 30) for name in STREAMS} == STREAMS


def test_several_streams_are_copied_at_once(reader: IsolatedReader, tmp_path: Path) -> None:
    def copy(name: str) -> None:
        with (tmp_path / name).open("wb") as file:
            reader.copy_to(name, file.fileno())

    threads = [threading.Thread(target=copy, args=(name,)) for name in STREAMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: (tmp_path / name).read_bytes() for name in STREAMS} == STREAMS


def test_the_process_has_no_privileges(reader: IsolatedReader) -> None:
    pid = reader._process.pid
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
    assert status["Groups"].split() == []
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 1 << 2  # CAP_DAC_READ_SEARCH
    assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
    assert status["NoNewPrivs"] == "1"


ESCAPE = """
import sys
from pathlib import Path
from stasis.store.sandbox import confine
folder, other = Path(sys.argv[1]), Path(sys.argv[2])
confine(folder)
assert (folder / "secret").read_text() == "inside"
def fails(action):
    try:
        action()
    except OSError:
        return
    sys.exit(f"{action} was allowed")
fails(lambda: (other / "secret").read_text())
fails(lambda: Path("/etc/passwd").read_text())
fails(lambda: (folder / "secret").write_text("x"))
fails(lambda: (folder / "new").write_text("x"))
fails(lambda: (folder / "secret").unlink())
fails(lambda: __import__("os").kill(1, 0))
fails(lambda: __import__("os").setuid(0))
print("confined")
"""


def test_what_is_confined_reads_one_folder_and_changes_nothing(tmp_path: Path) -> None:
    for name in ("in", "out"):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "secret").write_text("inside")
        (tmp_path / name / "secret").chmod(0o600)
    package = str(Path(__file__).parents[2] / "operator" / "src")
    done = subprocess.run(
        [sys.executable, "-c", ESCAPE, str(tmp_path / "in"), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "confined\n"), done.stderr


def test_errors_come_through(reader: IsolatedReader, digest: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        reader.size("other")
    with pytest.raises(NotFound):
        reader.read("other", 1)
    with pytest.raises(UsageError):
        reader.read("s1", 10)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with pytest.raises(BrokenPipeError):
        reader.copy_to("s1", write_end)
    os.close(write_end)
    with pytest.raises(NotFound, match="nothing"):
        IsolatedReader(f"{tmp_path}/nothing", digest)
    with pytest.raises(Corrupt, match=digest):
        IsolatedReader(f"{tmp_path}", digest)


def test_damage_is_named(tmp_path: Path) -> None:
    digest = write(tmp_path)
    largest = max((tmp_path / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with IsolatedReader(tmp_path.as_posix(), digest) as reader, pytest.raises(Corrupt, match=largest.name):
        for name in STREAMS:
            reader.read(name, 1 << 30)


def test_a_process_that_died_is_an_error(reader: IsolatedReader) -> None:
    reader._process.kill()
    reader._process.wait()
    with pytest.raises(StoreError):
        reader.read("s1", 1 << 30)
