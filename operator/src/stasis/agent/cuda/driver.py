"""What the CUDA driver does for a checkpoint, whoever is asked to do it: cuda-checkpoint or the driver API.

Lock, checkpoint and restore hang on a frozen process, and a call that was given up still happens once the process runs:
so each call has a deadline, and who gave one up looks again.
"""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, NoReturn

from stasis.errors import StasisError


class State(StrEnum):
    """Of a CUDA process, as the driver tells it."""

    RUNNING = "running"
    LOCKED = "locked"  # its calls wait
    CHECKPOINTED = "checkpointed"  # device memory is in host memory, no device is held
    FAILED = "failed"  # nothing brings it back


class CudaError(StasisError):
    """The driver refused a call, in its own words."""

    def __init__(self, call: str, pid: int, text: str) -> None:
        super().__init__(f"CUDA {call} of process {pid}: {text}")
        self.text = text


class GivenUp(CudaError):
    """No answer in time: the call may still happen."""


class Patience:
    """How long a call is waited for: until a deadline, or until `cancel` (an eventfd) is rung."""

    def __init__(self, seconds: float, cancel: int | None = None) -> None:
        self._start = time.monotonic()
        self._seconds = seconds
        self._cancel = cancel

    def wait(self, fd: int) -> bool:
        """Until `fd` is readable; False: in vain."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if self._cancel is not None:
            poll.register(self._cancel, select.POLLIN)
        left = self._start + self._seconds - time.monotonic()
        return any(ready == fd for ready, _ in poll.poll(max(0.0, left) * 1000))

    def give_up(self, call: str, pid: int) -> NoReturn:
        raise GivenUp(call, pid, f"no answer after {time.monotonic() - self._start:.1f} s")


class Driver(ABC):
    """Calls on one process (a host pid), from any thread. Each raises CudaError or GivenUp.

    An answer without an error says little: whoever calls looks at `state` afterwards.
    """

    name: ClassVar[str]

    @abstractmethod
    def call(self, call: str, pid: int, patience: Patience, arguments: Mapping[str, object]) -> str: ...

    def state(self, pid: int, patience: Patience) -> State:
        answer = self.call("get-state", pid, patience, {})
        try:
            return State(answer)
        except ValueError:
            raise CudaError("get-state", pid, f"an unknown state: {answer}") from None

    def restore_thread(self, pid: int, patience: Patience) -> int:
        return int(self.call("get-restore-tid", pid, patience, {}))

    def lock(self, pid: int, seconds: float, patience: Patience) -> None:
        """`seconds`: in which the driver itself gives up, and leaves the process running."""
        self.call("lock", pid, patience, {"timeout": max(1, int(seconds * 1000))})

    def checkpoint(self, pid: int, patience: Patience) -> None:
        self.call("checkpoint", pid, patience, {})

    def restore(self, pid: int, gpus: Mapping[str, str], patience: Patience) -> None:
        """Ends locked. `gpus`: UUID of every GPU that the process had -> UUID of the one that takes its place; empty:
        the same ones."""
        self.call("restore", pid, patience, {"gpus": dict(gpus)} if gpus else {})

    def unlock(self, pid: int, patience: Patience) -> None:
        self.call("unlock", pid, patience, {})

    @abstractmethod
    def close(self) -> None: ...
