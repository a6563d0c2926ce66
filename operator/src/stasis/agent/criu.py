"""Run the bundled CRIU inside a container: dump a frozen tree, restore one under init.

CRIU runs with our privileges among a tenant's files, so it is deaf to what the container brings: its own loader and
libraries, no configuration files, an empty plugin folder, an empty environment (criu/config.c reads
/etc/criu/default.conf and $HOME/.criu otherwise).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stasis.agent import cgroups
from stasis.agent.launch import enter, kill_group, wait
from stasis.agent.stream import Capture, Serve, first_error
from stasis.errors import CheckpointFailed, RestoreFailed

LOADER = "ld-linux-x86-64.so.2"
COMMON = (
    "--no-default-config",
    "--tcp-established",
    "--ext-unix-sk",
    "--file-locks",
    "--link-remap",
    "--manage-cgroups=ignore",
    "-v3",
)


Journal = Callable[[int], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Outcome:
    """What CRIU left: its log and the processor time it took (seconds)."""

    log: str
    cpu: float


class Criu:
    """One bundle, used for one operation after another. `preload` is a library for tests of machines that lack
    CAP_SYS_RESOURCE; `journal` is entered with the
    process group of each CRIU while it runs, so that it does not outlive the agent."""

    def __init__(self, bundle: Path, *, journal: Journal = contextlib.nullcontext) -> None:
        self.bundle = bundle
        self.preload = os.environ.get("STASIS_CRIU_PRELOAD", "")
        self._journal = journal
        self._process: subprocess.Popen[bytes] | None = None

    def dump(
        self, pid1: int, root: int, cgroup: int, capture: Callable[[Path], Capture], *, timeout: float
    ) -> tuple[Capture, Outcome]:
        """Dump the frozen tree below `root` (its pid inside the container) into the streams of `capture`.

        `cgroup` is a descriptor of the tree's freezer folder; the tree is left frozen and alive.
        """
        with self._workplace(cgroup) as (folder, fds):
            server = capture(folder)
            arguments = [
                "dump",
                *("-t", str(root)),
                *COMMON,
                "--stream",
                "--leave-running",
                *("--freeze-cgroup", f"/proc/self/fd/{cgroup}"),
                *("--network-lock", "skip"),
                "--skip-in-flight",  # of outsiders; the gang's were looked for before
                *("--ghost-limit", str(1 << 40)),
            ]
            outcome, code = self._run(pid1, arguments, folder, fds, [], timeout)
            if code != 0:
                server.abandon()
                for stream in server.streams.values():
                    stream.close()
                raise first_error(server) or CheckpointFailed(
                    f"CRIU could not dump the tree of pid {root} in the container: {explain(outcome.log, code)}"
                )
            server.join()
            return server, outcome

    def restore(
        self,
        pid1: int,
        sources: Mapping[str, Callable[[int], None]],
        *,
        cgroups: Sequence[Path],
        inherit: Mapping[str, int],
        timeout: float,
        spill: bool = False,
    ) -> Outcome:
        """Restore a tree as a child of `pid1`, every task stopped, born in `cgroups`.

        `inherit` maps resources of the images (`pipe:[123]`) to descriptors of the new container's. `spill`: give the
        images as files (of mode 0600, in a folder that is removed): CRIU reads memory in huge pages by its position,
        which a stream has not.
        """
        with self._workplace(*inherit.values()) as (folder, fds):
            if spill:
                _write_files(folder, sources)
            server = None if spill else Serve(folder, sources)
            arguments = ["restore", "-d", "-s", *COMMON, *([] if spill else ["--stream"])]
            for resource, fd in inherit.items():
                arguments += ["--inherit-fd", f"fd[{fd}]:{resource}"]
            outcome, code = self._run(pid1, arguments, folder, fds, cgroups, timeout)
            if code != 0:
                if server:
                    server.abandon()
                cause = first_error(server) if server else None
                raise cause or RestoreFailed(f"CRIU could not restore the tree: {explain(outcome.log, code)}")
            if server:
                server.join()
            return outcome

    def kill(self) -> None:
        """Kill a CRIU that is under way (from another thread)."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _workplace(self, *fds: int) -> Iterator[tuple[Path, list[int]]]:
        with tempfile.TemporaryDirectory(prefix="stasis-criu-") as name:
            folder = Path(name)
            paths = [self.bundle, folder, *([Path(self.preload)] if self.preload else [])]
            own = [os.open(path, os.O_PATH) for path in paths]
            try:
                yield folder, [*own, *fds]
            finally:
                for fd in own:
                    os.close(fd)

    def _run(
        self, pid1: int, arguments: list[str], folder: Path, fds: list[int], cgroups: Sequence[Path], timeout: float
    ) -> tuple[Outcome, int]:
        bundle, images = (f"/proc/self/fd/{fd}" for fd in fds[:2])
        argv = [f"{bundle}/{LOADER}", "--library-path", bundle]
        if self.preload:
            argv += ["--preload", f"/proc/self/fd/{fds[2]}"]
        argv += [f"{bundle}/criu", *arguments, "-D", images, "-W", images, "-o", "criu.log", "--lib", f"{bundle}/lib"]
        with open(folder / "out", "w+b") as output:
            before = os.times()
            process = enter(pid1, argv, fds=fds, cgroups=cgroups, env={}, output=output.fileno())
            self._process = process
            try:
                with self._journal(process.pid):
                    code = wait(process, timeout)
            except subprocess.TimeoutExpired:
                kill_group(process)
                code = -signal.SIGKILL
            except BaseException:
                kill_group(process)
                raise
            finally:
                self._process = None
            after = os.times()
            output.seek(0)
            log = output.read().decode(errors="replace")
        if (path := folder / "criu.log").exists():
            log += path.read_text(errors="replace")
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return Outcome(log, cpu), code


def _write_files(folder: Path, sources: Mapping[str, Callable[[int], None]]) -> None:
    for name, write in sources.items():
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write(fd)
        finally:
            os.close(fd)


def explain(log: str, code: int) -> str:
    """The lines of CRIU's log that name the cause, the first ones first: what follows them is their consequence."""
    noise = re.compile(r"tun\.c|RLIMIT_NOFILE for self|Dumping FAILED|Restoring FAILED|Unable to open .*stats")
    errors = [line for line in log.splitlines() if "Error (" in line and not noise.search(line)]
    texts = [re.sub(r"^\(\d+\.\d+\)\s*(\d+: )?Error \([^)]*\): ", "", line.strip()) for line in errors[:3]]
    if code == -signal.SIGKILL or code == 137:
        texts.insert(0, "CRIU was killed, or took longer than it may")
    return "; ".join(texts) or log.strip()[-300:] or f"exit status {code}"


def container_cgroups(pid1: int, freezer: Path) -> list[Path]:
    """The folders that a restored tree is born in: its container's in every hierarchy, `freezer` below one of them."""
    folders = map(Path, cgroups.folders(pid1))
    return sorted(freezer if folder == freezer.parent else folder for folder in folders)
