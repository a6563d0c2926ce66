"""The nodes' agents: the real daemon's server and members, with programs that only count in place of processes.

A program prints a number, one more each time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from stasis.agent import kept
from stasis.agent.executor import FINAL
from stasis.agent.journal import BOOT_ID, StateDir
from stasis.agent.node import Job
from stasis.agent.ports import JournalPort
from stasis.agent.records import Records
from stasis.agent.runner import BootClock, Runner
from stasis.core import driver
from stasis.core import machine as m
from stasis.core.driver import MemberDriver, Reply
from stasis.core.member import Member
from stasis.core.rankconfig import RankConfig
from stasis.core.records import Failure
from stasis.core.steps import Step
from stasis.daemon.ranks import Ranks
from stasis.daemon.server import Server
from stasis.errors import CheckpointFailed, StasisError
from stasis.store.connect import open_repository
from stasis.store.media import Descriptor
from stasis.store.writer import RankWriter

BEAT = 0.01  # seconds between two numbers of a program


class Program:
    """What runs in one container: `waiting` (a placeholder), `running`, `frozen`, `ended`."""

    def __init__(self, rank: int, state: str) -> None:
        self.rank = rank
        self.state = state
        self.count = 0


class World:
    """All programs, and what they printed: `lines[rank]` over all containers of a rank."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs: dict[str, Program] = {}
        self.lines: dict[int, list[int]] = {}
        self.saved: dict[str, int] = {}  # manifest -> count
        self.failing: dict[Step, StasisError] = {}
        self.results: dict[Step, dict[str, Any]] = {}  # what steps return besides
        self.on_step: Callable[[Step, int], None] = lambda step, rank: None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with self.lock:
                for program in self.programs.values():
                    if program.state == "running":
                        program.count += 1
                        self.lines.setdefault(program.rank, []).append(program.count)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def start(self, container: str, rank: int, *, placeholder: bool) -> None:
        with self.lock:
            self.programs[container] = Program(rank, "waiting" if placeholder else "running")

    def stop(self, container: str) -> bool:
        """SIGTERM, which a frozen program does not react to; whether it has ended."""
        with self.lock:
            program = self.programs.get(container)
            if program is not None and program.state in ("running", "waiting"):
                program.state = "ended"
            return program is None or program.state == "ended"

    def power_off(self, container: str) -> None:
        with self.lock:
            self.programs[container].state = "ended"

    def word(self, container: str) -> None:
        with self.lock:
            program = self.programs[container]
            if program.state == "waiting":
                program.state = "running"

    def states(self) -> list[str]:
        with self.lock:
            return sorted(p.state for p in self.programs.values() if p.state != "ended")


class PlayedExecutor:
    """One rank's steps, on a program."""

    def __init__(self, world: World, state: StateDir, progress: Callable[[int], None]) -> None:
        self._world = world
        self._state = state
        self._progress = progress
        self._job: Job | None = None
        self._count = 0
        self._pool = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None:
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._run, step, args, token, reply)

    def _run(self, step: Step, args: Mapping[str, Any], token: int, reply: Reply) -> None:
        began = BootClock().now()
        try:
            if step in (Step.PREPARE, Step.PLACE):
                self._job = Job.from_args(args)
            rank = self._job.rank if self._job else -1
            if step is Step.STORE:
                self._progress(2048)
            self._world.on_step(step, rank)
            if (error := self._world.failing.get(step)) is not None:
                raise error
            result = self._carry_out(step)
        except StasisError as error:
            again = not isinstance(error, FINAL)
            reply(m.StepFailed(token, Failure.of(error, step=step, retryable=again)))
            return
        except Exception as error:
            reply(m.StepFailed(token, Failure(type(error).__name__, str(error), step=step)))
            return
        result |= self._world.results.get(step, {})
        reply(m.StepDone(token, {**result, "began": began, "ended": BootClock().now()}))

    def _carry_out(self, step: Step) -> dict[str, Any]:
        world = self._world
        with world.lock:
            program = world.programs.get(self._job.container_id) if self._job else None
            if program is None:
                if step in (Step.PREPARE, Step.PLACE):
                    raise CheckpointFailed("no such container")
                return {}
            match step:
                case Step.PREPARE if program.state != "running":
                    raise CheckpointFailed(f"the program is {program.state}")
                case Step.PLACE if program.state != "waiting":
                    raise CheckpointFailed(f"the placeholder is {program.state}")
                case Step.FREEZE if program.state == "running":
                    program.state = "frozen"
                case Step.LOCK_NETWORK:
                    return {"in_flight": 0}
                case Step.CAPTURE:
                    assert program.state == "frozen"
                    self._count = program.count
                    return {"size": 4096, "connections": [], "bound": []}
                case Step.THAW if program.state == "frozen":
                    program.state = "running"
                case Step.RELEASE:
                    program.state = "ended"
                case Step.RESTORE if program.state != "ended":
                    assert self._job is not None
                    program.state, program.count = "frozen", world.saved[self._job.manifest]
                case Step.TEAR_DOWN if program.state != "ended":
                    program.state, program.count = "waiting", 0
        return self._store() if step is Step.STORE else {}

    def _store(self) -> dict[str, Any]:
        job = self._job
        assert job is not None
        config = RankConfig(
            uid=job.uid,
            rank=job.rank,
            world_size=job.world_size,
            root=7,
            threads=1,
            last_pid=9,
            hostname=f"rank-{job.rank}",
            init="/stasis/0123abcd/init",
            addresses={rank: list(known[:1]) for rank, known in job.addresses.items()},
            sizes={"memory": 1 << 20},
        )
        with open_repository(kept.store_of(job, self._state.path)) as repository:
            writer = RankWriter(repository, uid=job.uid, rank=job.rank)
            writer.put("criu/pages-1.img", os.urandom(4096))

            def announce(manifest: Descriptor) -> None:
                if job.local:
                    kept.announce(self._state, job, manifest.digest)

            manifest = writer.finish(config.to_dict(), announce=announce).manifest.digest
        self._world.saved[manifest] = self._count
        return {"manifest": manifest}


class PlayedGuardian:
    """Holds no deadline; the fate is as the agent claims it."""

    def __init__(self) -> None:
        self._fate: str | None = None

    def arm(self, op: str, deadline: float, poll: float, reply: Reply) -> None:
        self._fate = self._fate or ""
        reply(m.GuardianUp(deadline))

    def claim(self, value: str) -> str:
        self._fate = self._fate or value
        return self._fate

    def fate(self) -> str | None:
        return self._fate

    def disarm(self) -> None:
        self._fate = None


class PlayedAgent:
    """What `daemon.Ranks` needs of an agent: real journals and records, played programs."""

    def __init__(self, folder: Path, world: World) -> None:
        self.state = StateDir(folder)
        self.records = Records(folder / "records")
        self._world = world
        self._guardians: dict[str, PlayedGuardian] = {}

    def member(
        self,
        op: str,
        rank: int,
        *,
        clock: BootClock,
        transport: driver.Transport,
        records: driver.Records,
        progress: Callable[[int], None],
        carry_out: Callable[[Any], driver.Executor],
        observe: driver.Observer,
        failed: Callable[[BaseException], None],
        **_: Any,
    ) -> Runner:
        executor = PlayedExecutor(self._world, self.state, progress)
        guardian = self._guardians.setdefault(f"{op}.{rank}", PlayedGuardian())
        return Runner(
            lambda wake: MemberDriver(
                Member(rank),
                boot=BOOT_ID.read_text().strip(),
                clock=clock,
                transport=transport,
                records=records,
                executor=carry_out(executor),
                guardian=guardian,
                journal=JournalPort(self.state, f"{op}.{rank}"),
                wake=wake,
                observe=observe,
            ),
            clock,
            executor.close,
            failed,
        )

    def take_over(self, release: Any) -> None:
        """Nothing outlives a played agent."""

    def forget(self, op: str) -> None:
        for name in self.state.names("member"):
            if name.startswith(f"{op}."):
                self.state.remove("member", name)


@dataclass
class PlayedNode:
    """A node's daemon, on an address of its own of the loopback network."""

    name: str
    address: str
    dead: bool = False
    ranks: Ranks | None = None
    server: Server | None = None
    runners: list[web.AppRunner] = field(default_factory=list)
