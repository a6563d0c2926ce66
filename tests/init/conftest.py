"""Containers reduced to what init needs: a PID namespace (and others) of their own, init as PID 1, the host's files."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def until(seen: Callable[[], object], what: str) -> None:
    """Wait until `seen()` is true; what it waits for happens at once unless something is broken."""
    end = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < end, f"not seen: {what}"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def status(pid: int) -> dict[str, str]:
    """/proc/PID/status; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


class Init:
    """One run of init as PID 1. stdout and stderr are files opened inside, as CRIU wants it."""

    def __init__(
        self, folder: Path, argv: Sequence[str | Path], *, wrap: str = "", pass_fds: Sequence[int] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.out, self.err = folder / "out", folder / "err"
        inside = "mount -t tmpfs run /run; "  # CRIU leaves criu.kdat there
        inside += f"exec {wrap} {shlex.join(map(str, argv))} </dev/null >>{self.out} 2>>{self.err}"
        namespaces = ["--fork", "--pid", "--mount-proc", "--kill-child", "--ipc", "--uts"]
        self.unshare = subprocess.Popen(["unshare", *namespaces, "sh", "-c", inside], pass_fds=pass_fds)
        until(self._comm_is_init, "init as PID 1")

    def _comm_is_init(self) -> bool:
        if self.unshare.poll() is not None:
            return True
        kids = children(self.unshare.pid)
        self.pid = kids[0] if kids else 0
        return status(self.pid).get("Name", "").startswith("stasis-")

    @property
    def keeper(self) -> int:
        until(lambda: children(self.pid), "the keeper")
        return children(self.pid)[0]

    @property
    def trainer(self) -> int:
        keeper = self.keeper
        until(lambda: self._executed(keeper), "the trainer")
        return self._executed(keeper)[0]

    @staticmethod
    def _executed(keeper: int) -> list[int]:
        return [pid for pid in children(keeper) if status(pid).get("Name", "stasis-keeper") != "stasis-keeper"]

    def says(self, text: str) -> None:
        """Wait until `text` is on stdout or stderr."""
        until(lambda: text in self.output(), text)

    def output(self) -> str:
        return "".join(path.read_text() if path.exists() else "" for path in (self.out, self.err))

    def wait(self) -> int:
        return self.unshare.wait(20)

    def close(self) -> None:
        if self.unshare.poll() is None:
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
            self.unshare.kill()
            self.unshare.wait()


@pytest.fixture(scope="session")
def init_binary() -> Path:
    return Path(subprocess.run([TOOLS / "init.sh"], check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, but open to other users, as a container's folders are."""
    with tempfile.TemporaryDirectory(prefix="stasis-init-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The agent's folder in the container."""
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, volume: Path, init_binary: Path) -> Iterator[Callable[..., Init]]:
    """start("run", "CMD", "ARG", options=[...], hook=[...]): init with that mode and command in a container of its
    own."""
    running: list[Init] = []

    def begin(
        mode: str, *command: str | Path, options: Sequence[str] = (), hook: Sequence[str] = (), **more: object
    ) -> Init:
        pre_stop = ["--pre-stop", str(len(hook)), *hook] if hook else []
        argv = [init_binary, mode, *options, "--volume", volume, *pre_stop, "--", *command]
        running.append(Init(tmp_path / f"c{len(running)}", argv, **more))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for container in running:
        container.close()


@pytest.fixture
def write(volume: Path) -> Callable[[str, str], None]:
    """write(NAME, TEXT): as the agent writes into the volume."""

    def put(name: str, text: str) -> None:
        new = volume / f".{name}"
        new.write_text(text + "\n")
        new.rename(volume / name)

    return put
