"""Gangs of real trainers with gloo, on the torch of a Debian root file system, and who checkpoints them."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from stasis_trainer.client import Trainer
from stasis_trainer.cut import Cut, Debt

REPO = Path(__file__).parents[2]
SCRIPTS = {"oldest": REPO / "tools/rootfs.sh", "newest": REPO / "tests/collectives/sid.sh"}
INJECTED = "/mnt/trainer/stasis_trainer/inject"


class NotClosed(Exception):
    def __init__(self, debts: list[Debt], busy: list[str]) -> None:
        super().__init__("; ".join([*map(str, debts), *busy]))
        self.debts = debts


@cache
def root(torch: str) -> Path:
    return Path(subprocess.run([SCRIPTS[torch]], check=True, capture_output=True, text=True).stdout.strip())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def in_root(torch: str, folder: Path, command: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The command with the root file system around it, `folder` as /mnt/run; mounts are gone when it ends."""
    at = shlex.quote(str(root(torch)))
    binds = {"trainer": REPO / "trainer/src", "jobs": REPO / "tests/collectives/jobs", "run": folder}
    mounts = "".join(
        f"mkdir {at}/mnt/{name}; mount --bind {shlex.quote(str(path))} {at}/mnt/{name}; "
        for name, path in binds.items()
    )
    script = f"mount -t tmpfs none {at}/mnt; {mounts} mount -t proc proc {at}/proc; mount --rbind /dev {at}/dev; "
    given = {
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }
    run = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in given.items()), *command])
    return ["unshare", "-m", "sh", "-ec", f"{script} exec chroot {at} {run}"]


@dataclass
class Figures:
    """Of the checkpoints of one run, in seconds."""

    quiesce: list[float] = field(default_factory=list)
    teardown: list[float] = field(default_factory=list)
    rebuild: list[float] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)  # left at a teardown

    def __str__(self) -> str:
        def of(values: list[float]) -> str:
            ordered = sorted(values)
            return f"{1e3 * ordered[len(ordered) // 2]:.1f} / {1e3 * ordered[-1]:.1f} ms" if ordered else "none"

        return (
            f"{len(self.quiesce)} triggers, {len(self.rebuild)} rebuilds; median / max: quiesce {of(self.quiesce)}, "
            f"teardown {of(self.teardown)}, rebuild {of(self.rebuild)}"
        )


class Gang:
    def __init__(self, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self.folder, self.processes = folder, processes
        self.epoch = 0
        self.figures = Figures()

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait(self, timeout: float = 120.0) -> list[str]:
        """What each rank printed, once all have ended well."""
        end = time.monotonic() + timeout
        for process in self.processes:
            try:
                code = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._stacks()
                raise AssertionError(f"not ended after {timeout} s\n{self.errors()}") from None
            assert code == 0, self.errors()
        return self.outputs()

    def _stacks(self) -> None:
        """To standard error, of ranks that hang."""
        for process in self.processes:
            process.send_signal(signal.SIGABRT)
        time.sleep(1)

    def outputs(self) -> list[str]:
        paths = sorted(self.folder.glob("*.out")) or sorted(self.folder.glob("log/*/attempt_0/*/stdout.log"))
        return [path.read_text() for path in paths]

    def errors(self) -> str:
        paths = [*sorted(self.folder.glob("*.err")), *sorted(self.folder.glob("log/*/attempt_0/*/stderr.log"))]
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in paths)

    def expect_lines(self, count: int, timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while not self.outputs() or min(text.count("\n") for text in self.outputs()) < count:
            assert self.alive(), self.errors()
            assert time.monotonic() < end, self.errors()
            time.sleep(0.05)

    @contextlib.contextmanager
    def trainers(self) -> Iterator[list[Trainer]]:
        """A connection to every process that has a socket and lives."""
        with contextlib.ExitStack() as connected:
            found = []
            for path in sorted(self.folder.glob("*.sock")):
                if Path(f"/proc/{path.stem}").exists():
                    with contextlib.suppress(ConnectionRefusedError):
                        found.append(connected.enter_context(Trainer(path)))
            yield found

    def checkpoint(self, rebuild: bool = True, timeout: float = 20.0) -> None:
        """Quiesce; then tear down and rebuild at another address and port, or go on at once."""
        with self.trainers() as trainers:
            self.figures.quiesce.append(quiesce(trainers, timeout))
            for trainer in trainers:
                trainer.commit()
            if not rebuild:
                for trainer in trainers:
                    trainer.resume()
                return
            begun = time.monotonic()
            for trainer in trainers:
                trainer.teardown()
            for trainer in sorted(trainers, key=serves):
                self.figures.sockets += trainer.close_groups()
            self.figures.teardown.append(time.monotonic() - begun)
        self.rebuild()

    def rebuild(self) -> None:
        self.epoch += 1
        with self.trainers() as trainers:
            begun = time.monotonic()
            endpoints = {}
            for store in (store for trainer in trainers for store in trainer.hello["stores"] if store["server"]):
                endpoints[store["endpoint"]] = (f"127.0.0.{2 + self.epoch % 200}", free_port())
            # torchrun gives its agent's address to ranks under another name than the agent's own.
            ports = {name.rpartition(":")[2]: place for name, place in endpoints.items()}
            for store in (store for trainer in trainers for store in trainer.hello["stores"]):
                endpoints.setdefault(store["endpoint"], ports[store["endpoint"].rpartition(":")[2]])
            for trainer in sorted(trainers, key=serves, reverse=True):
                trainer.begin_rebuild(str(self.epoch), endpoints)
            for trainer in trainers:
                trainer.end_rebuild()
            self.figures.rebuild.append(time.monotonic() - begun)
            for trainer in trainers:
                trainer.resume()


def serves(trainer: Trainer) -> bool:
    return any(store["server"] for store in trainer.hello["stores"])


def quiesce(trainers: list[Trainer], timeout: float) -> float:
    """Seconds until the gang was at rest; disarmed again where it does not come to rest."""
    begun = time.monotonic()
    cut = Cut(range(len(trainers)))
    for trainer in trainers:
        trainer.arm()
    while not cut.closed:
        if time.monotonic() - begun > timeout:
            for trainer in trainers:
                trainer.disarm()
            raise NotClosed(cut.debts(), cut.busy())
        for trainer in select.select(trainers, [], [], 0.1)[0]:
            trainer.receive()
            if trainer.state:
                cut.observe(trainers.index(trainer), trainer.state)
        for index, targets in cut.to_send().items():
            trainers[index].set_targets(targets)
    return time.monotonic() - begun


@contextlib.contextmanager
def gang(
    folder: Path, job: str, torch: str = "oldest", ranks: int = 2, steps: int = 50, active: bool = True, **more: str
) -> Iterator[Gang]:
    """Ranks of a job from the folder `jobs`, each started by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= _environment(steps, active) | more
    with contextlib.ExitStack() as running:
        processes = [
            running.enter_context(
                _process(
                    folder,
                    f"{rank}",
                    torch,
                    [f"/mnt/jobs/{job}.py"],
                    common | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                )
            )
            for rank in range(ranks)
        ]
        yield Gang(folder, processes)


@contextlib.contextmanager
def torchrun(
    folder: Path, job: str, torch: str = "oldest", ranks: int = 2, steps: int = 50, active: bool = True
) -> Iterator[Gang]:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={ranks}"]
    command += ["--redirects=3", "--log-dir=/mnt/run/log", f"/mnt/jobs/{job}.py"]
    with _process(folder, "torchrun", torch, command, _environment(steps, active)) as process:
        gang = Gang(folder, [process])
        (folder / "torchrun.out").unlink()
        yield gang


def disturb(gang: Gang, triggers: int, seed: int, gap: float = 0.1, rebuilds: float = 0.4) -> None:
    """Checkpoints at random instants, until the job ends or so many were made; some of them rebuild."""
    rng = random.Random(seed)
    for _ in range(triggers):
        time.sleep(rng.random() * gap)
        rebuild = rng.random() < rebuilds
        try:
            gang.checkpoint(rebuild)
        except (ConnectionError, FileNotFoundError, ValueError):
            if all(process.wait(10) == 0 for process in gang.processes):
                return
            raise


def _environment(steps: int, active: bool) -> dict[str, str]:
    hooked = {"PYTHONPATH": INJECTED, "STASIS_COLLECTIVES": "/mnt/run"} if active else {}
    return {"STEPS": str(steps), **hooked}


@contextlib.contextmanager
def _process(
    folder: Path, name: str, torch: str, arguments: Sequence[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    command = in_root(torch, folder, ["python3", "-X", "faulthandler", *arguments], environment)
    with open(folder / f"{name}.out", "wb") as out, open(folder / f"{name}.err", "wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
