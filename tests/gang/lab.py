"""One gang of the light trainer with its operator, and what must hold of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.gang.trainer import chain

from stasis.agent import provision
from stasis.agent.freezer import Freezer
from stasis.agent.lookup import host_pids
from stasis.agent.names import hostname
from stasis.agent.network.lock import is_locked
from stasis.agent.proctree import dead, read
from stasis.core.plan import Timing
from stasis.demo.proof import differences, steps
from stasis.local.gang import GangSpec, LocalGang
from stasis.local.operator import LocalOperator

TIMING = Timing(frozen=60.0, prepared=60.0, storing=120.0, step=60.0, lease=1.0, takeover=1.0, margin=1.0, resend=0.2)


class Lab:
    """`folder` holds the gang, its state and its store. `program`: of the folder that is mounted at /code."""

    def __init__(
        self,
        name: str,
        folder: Path,
        ranks: int,
        *,
        pause: float = 0.02,
        program: str = "trainer.py",
        where: str = "",
        timing: Timing = TIMING,
        env: dict[str, str] | None = None,
        keep: bool = False,
        options: Mapping[str, object] | None = None,
        of_rank: Mapping[int, Mapping[str, object]] | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self.ranks = ranks
        self.control = folder / "control"
        self.control.mkdir(parents=True)
        spec = GangSpec(
            ["python3", f"/code/{program}", str(pause)],
            ranks,
            provision.rootfs(),
            provision.init(),
            env=env or {},
            options={"volumes": {"/code": Path(__file__).parent, "/control": self.control}, **(options or {})},
            of_rank=of_rank or {},
        )
        self.gang = LocalGang(name, spec, folder / "gang")
        self.gang.start()
        self.where = where or f"{folder}/store:test"
        self.on_stage: Callable[[str], None] = lambda what: None
        self.operator = LocalOperator(
            self.gang, self.where, timing=timing, on_stage=lambda what: self.on_stage(what), keep=keep
        )

    def progress(self, count: int = 3, timeout: float = 60.0) -> None:
        """Wait until every rank has done `count` more steps."""
        before = {rank: len(steps(lines)) for rank, lines in self.gang.lines.items()}
        done = self.gang.wait_for(lambda: all(self.done(rank) >= before[rank] + count for rank in before), timeout)
        assert done, f"no {count} more steps: {self.tails()}"

    def done(self, rank: int) -> int:
        return len(steps(self.gang.lines[rank]))

    def finish(self) -> None:
        """Let the trainer end, and check that it was never disturbed."""
        (self.control / "stop").touch()
        assert self.gang.wait(60.0) == dict.fromkeys(range(self.ranks), 0), self.tails()
        self.check(self.gang.lines)

    def check(self, logs: dict[int, list[str]]) -> None:
        count = max(len(steps(lines)) for lines in logs.values())
        assert differences(logs, {rank: self.undisturbed(rank, count) for rank in logs}) == []

    def undisturbed(self, rank: int, count: int) -> list[str]:
        value, lines = 0, []
        for step in range(count):
            value = chain(self.ranks, value, step)
            lines.append(f"step {step} rank {rank} loss {value} number 00000000 pid 0")
        return lines

    def agent(self, verb: str, point: str = "-", *, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """An agent in a process of its own; it kills itself at `point`."""
        description = self.folder / "description"
        places = {rank: {"id": p.container.id, "address": p.address} for rank, p in self.gang.places.items()}
        timing = self.operator.timing.to_dict()
        content = {"places": places, "folder": str(self.gang.folder), "where": self.where, "timing": timing}
        description.write_text(json.dumps(content))
        return subprocess.Popen(
            [sys.executable, Path(__file__).with_name("agent_main.py"), description, verb, point],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})},
        )

    def frozen(self) -> list[int]:
        """Ranks whose trees are not running."""
        return [rank for rank, place in self.gang.places.items() if _state(place.container.pid1) != "thawed"]

    def processes(self, rank: int) -> list[int]:
        """The processes of a rank's container, without its PID 1."""
        pid1 = self.gang.places[rank].container.pid1
        space = os.readlink(f"/proc/{pid1}/ns/pid")
        found = []
        for pid in host_pids():
            try:
                if pid != pid1 and os.readlink(f"/proc/{pid}/ns/pid") == space and not dead(pid):
                    found.append(pid)
            except OSError:
                continue  # gone meanwhile
        return found

    def crius(self, verb: str) -> list[int]:
        """The CRIUs in the gang's containers that `dump` or `restore`."""
        found = []
        for pid in (pid for rank in self.gang.places for pid in self.processes(rank)):
            with contextlib.suppress(OSError):  # gone meanwhile
                if f"/criu\0{verb}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def kill_crius(self, verb: str) -> bool:
        """Whether there were any."""
        for pid in (found := self.crius(verb)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    def guardians(self) -> list[int]:
        """The guardians of the gang's freezes, those that stand by among them."""
        found = []
        for pid in host_pids():
            with contextlib.suppress(OSError):  # gone meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if read(pid, pid, "comm") == "stasis-guardian" and f"{self.gang.folder}.state" in command:
                    found.append(pid)
        return found

    def files(self, rank: int) -> set[str]:
        """Names of all that lies in a rank's layer, emptyDirs and /dev/shm, without the image's own folders."""
        folder, image = self.gang.places[rank].container.folder, self.gang.spec.rootfs
        upper = {
            path for path in (folder / "upper").rglob("*") if not (image / path.relative_to(folder / "upper")).is_dir()
        }
        others = {path for area in ("shm", "emptydir") for path in (folder / area).rglob("*")}
        return {str(path.relative_to(folder)) for path in upper | others}

    def suspend_into_placeholders(self, **options: object) -> dict[int, set[str]]:
        """Suspend, and start placeholders; returns the files that each has."""
        self.operator.suspend()
        self.gang.wait(10)
        self.gang.replace(new_addresses=bool(options.pop("new_addresses", False)), options=options)
        return {rank: self.files(rank) for rank in self.gang.places}

    def not_waiting(self, files: Mapping[int, set[str]]) -> list[str]:
        """What a placeholder has that it had not when it was started: nothing, where a restore came to nothing."""
        found = [f"rank {rank} is frozen" for rank in self.frozen()] + [
            f"rank {rank} is locked" for rank in self.locked()
        ]
        for rank, place in self.gang.places.items():
            pid1 = place.container.pid1
            found += [f"rank {rank} has process {pid} ({read(pid, pid, 'comm')})" for pid in self.processes(rank)]
            found += [f"rank {rank} has {name}" for name in self.files(rank) ^ files[rank]]
            if hostname(pid1) != f"{self.name}-{rank}":
                found.append(f"rank {rank} is called {hostname(pid1)}")
            if os.path.exists(Freezer.of(pid1).path):
                found.append(f"rank {rank} has {Freezer.of(pid1).path}")
            state = place.container.folder / "volume/state"
            if state.exists() and (text := state.read_text().strip()) != "waiting":
                found.append(f"rank {rank} is {text}")
        return found

    def tails(self) -> dict[int, list[str]]:
        return {rank: lines[-6:] for rank, lines in self.gang.lines.items()}

    def locked(self) -> list[int]:
        """Ranks whose network is locked."""
        found = []
        for rank, place in self.gang.places.items():
            with open(f"/proc/{place.container.pid1}/ns/net") as netns:
                if is_locked(netns.fileno()):
                    found.append(rank)
        return found

    def close(self) -> None:
        self.operator.close()
        self.gang.delete()


def _state(pid1: int) -> str:
    try:
        with Freezer.of(pid1) as freezer:
            return freezer.state()
    except Exception:
        return "thawed"  # no group: nothing was gathered


def left_behind(name: str) -> Iterable[str]:
    """Network namespaces, containers, control groups, mounts and processes of a gang that should be gone."""
    for path in Path("/run/netns").glob(f"stasis-{name}*"):
        yield f"namespace {path}"
    for path in Path("/sys/fs/cgroup").glob(f"*/stasis/{name}*"):
        yield f"cgroup {path}"
    for path in Path("/sys/fs/cgroup").glob(f"*/stasis-{name}*"):
        yield f"cgroup {path}"
    listed = subprocess.run(["runc", "list", "-q"], capture_output=True, text=True).stdout
    yield from (f"container {one}" for one in listed.split() if one.startswith(f"{name}-"))
    yield from (f"mount {line.split()[4]}" for line in open("/proc/self/mountinfo") if f"/{name}/" in line)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{name}/gang" in text or f"{name}-" in text:
            yield f"process {text}"


def until(done: Callable[[], bool], timeout: float = 30.0) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.001)
    return False
