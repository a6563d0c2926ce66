"""An agent for tests, in a process of its own: does what it is told by lines on its standard input, one answer each."""

from __future__ import annotations

import os
import sys
import time
from ipaddress import ip_address
from pathlib import Path

from stasis.agent import proctree
from stasis.agent.freezer import Freezer
from stasis.agent.guardian import Guardian
from stasis.agent.journal import FrozenTree, StateDir
from stasis.agent.network import lock
from stasis.errors import StasisError


class Agent:
    def __init__(self, state: str, records: str, pid1: str, root: str, version: str, seconds: str) -> None:
        self.state = StateDir(Path(state))
        self.root = int(root)
        self.freezer = Freezer.of(int(pid1), version=version)  # type: ignore[arg-type]
        self.freezer.create()
        self.netns = os.open(f"/proc/{pid1}/ns/net", os.O_RDONLY)
        self.tree = FrozenTree(
            op="8a5e",
            rank=0,
            epoch=1,
            container_id="box",
            pid1=int(pid1),
            pid1_start=proctree.start_time(int(pid1)),
            root=self.root,
            root_start=proctree.start_time(self.root),
            cgroup=self.freezer.path,
            freezer=self.freezer.version,
            deadline=time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(float(seconds) * 1e9),
            records=records,
        )

    def arm(self) -> None:
        self.guardian = Guardian.start(self.state, self.tree)

    def rearm(self) -> str:
        """For ten minutes from now."""
        return str(self.guardian.rearm(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 600 * 10**9))

    def hurry(self) -> None:
        """For two seconds from now."""
        self.guardian.rearm(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 2 * 10**9)

    def freeze(self) -> None:
        self.freezer.gather(self.root)
        self.freezer.freeze()

    def lock(self) -> None:
        lock.lock(self.netns, [ip_address("10.9.9.1")])

    def vote(self) -> None:
        self.guardian.vote()

    def check(self) -> None:
        self.guardian.check()

    def ensure(self) -> str:
        return str(self.guardian.ensure())

    def thaw(self) -> None:
        lock.unlock(self.netns)
        self.freezer.thaw()

    def kill(self) -> None:
        self.freezer.kill()

    def stop(self) -> None:
        self.guardian.stop()


agent = Agent(*sys.argv[1:])
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(getattr(agent, line.strip())() or "done", flush=True)
    except StasisError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
