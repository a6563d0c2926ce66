"""One rank's side of an operation: its container, and the steps of the gang protocol that are carried out on it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from stasis.agent import lookup
from stasis.agent.cuda.devices import Devices
from stasis.agent.freezer import Freezer
from stasis.agent.lookup import Root
from stasis.agent.node import Job, Node
from stasis.core.steps import Step
from stasis.errors import UsageError

Args = Mapping[str, Any]
Result = dict[str, Any]


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Rank:
    """What a checkpoint and a restore of one rank have in common. `run(step, args)` carries a step out.

    Each step is idempotent, runs in a thread of the agent's, and returns JSON. The first one is told the job.
    """

    _pid1: int
    _root: Root

    def __init__(self, node: Node, steps: Mapping[Step, Callable[[Args], Result]]) -> None:
        self.node = node
        self._steps = {
            Step.RESTORE_DEVICES: self._restore_devices,
            Step.UNLOCK_DEVICES: self._unlock_devices,
            **steps,
        }
        self._cuda: Devices | None = None
        self._job: Job | None = None
        self._freezer: Freezer | None = None
        self._netns: int | None = None
        self._criu = node.criu()
        self._timings: dict[str, float] = {}  # seconds that each step took

    def recover(self, args: Args) -> None:
        """After a restart of the agent: find again what an earlier one worked on, so that it can be undone or, once it
        is decided, gone on with. `args` are the first step's."""
        self._job = Job.from_args(args)
        with contextlib.suppress(ProcessLookupError):
            self._find()

    def run(self, step: Step, args: Args) -> Result:
        """Carry a step out; those of collectives have nothing to do. With what it returns goes when it `began` and
        `ended` (seconds of CLOCK_BOOTTIME)."""
        began = boottime()
        work = self._steps.get(step)
        result = work(args) if work else {}
        ended = boottime()
        self._timings[step] = ended - began
        return {**result, "began": began, "ended": ended}

    def give_up(self) -> None:
        """Make a step that is under way in another thread fail."""
        self._criu.kill()
        if self._cuda is not None:
            self._cuda.give_up()

    @property
    def job(self) -> Job:
        if self._job is None:
            raise UsageError("a step before the first one")
        return self._job

    @property
    def devices(self) -> Devices:
        """What the rank has on GPUs; also what an agent before this one has begun there."""
        if self._cuda is None:
            self._cuda = Devices(self.node.hardware, self.node.state / f"devices-{self.job.container_id}")
        return self._cuda

    def _restore_devices(self, args: Args) -> Result:
        return self.devices.restore()

    def _unlock_devices(self, args: Args) -> Result:
        return self.devices.unlock()

    def _forget_devices(self) -> None:
        """All that was on GPUs runs there, or is gone."""
        self.devices.forget()
        self.devices.close()
        self._cuda = None

    @property
    def tree(self) -> tuple[int, Root, Freezer]:
        """PID 1 of the container, the tree's keeper, its freezer. Known once the tree was found, or restored."""
        assert self._freezer is not None
        return self._pid1, self._root, self._freezer

    def _find(self) -> None:
        """Raises ProcessLookupError where the container is gone."""
        self._pid1 = lookup.find_pid1(self.job.container_id)
        self._freezer = Freezer.of(self._pid1, container_id=self.job.container_id)
        if self._netns is None:
            self._netns = os.open(f"/proc/{self._pid1}/ns/net", os.O_RDONLY)

    def _close(self) -> None:
        """Close what is open of the container; the operation is over."""
        if self._netns is not None:
            os.close(self._netns)
            self._netns = None
        if self._freezer is not None:
            self._freezer.close()
