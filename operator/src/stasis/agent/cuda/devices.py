"""What one rank has on GPUs, and the four steps over all of it: lock, to host memory, back, unlock.

Which processes those are is written down before the first is locked: a checkpointed one holds no device any more, and
another agent may have to bring it back. A call that was given up, or cut short with its agent, may still happen: its
process is asked once more (calls queue behind each other), and then looked at again before the rank counts as undone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stasis.agent import proctree
from stasis.agent.cuda.driver import CudaError, GivenUp, Patience, State
from stasis.agent.cuda.find import holders, inner, minors
from stasis.agent.cuda.hardware import Hardware
from stasis.errors import CheckpointFailed, RestoreFailed

log = logging.getLogger(__name__)

LOCK_SECONDS = 30.0  # for kernels and calls under way
LOOK_SECONDS = 20.0  # for a state, and to unlock
MOVE_SECONDS = 280.0  # to or from host memory
SETTLE_SECONDS = 5.0  # for the answer to a call that says that those before it have happened
UNSETTLED_SECONDS = 120.0  # for which a process that runs is looked at, though its driver does not answer
SETTINGS = ("PATH", "LD_LIBRARY_PATH", "STASIS_", "CUDA", "NVIDIA_")  # of the environment, that the driver goes by


@dataclass(frozen=True)
class CudaProcess:
    """`gpus`: the UUIDs of those that it has."""

    pid: int
    start: int
    inner: int
    gpus: tuple[str, ...]

    def alive(self) -> bool:
        return proctree.start_time(self.pid) == self.start and not proctree.dead(self.pid)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CudaProcess:
        return cls(**{**data, "gpus": tuple(data["gpus"])})


class Devices:
    """`note`: the file in which another agent finds what this one has begun."""

    def __init__(self, hardware: Hardware, note: Path) -> None:
        self._hardware = hardware
        self._note = note
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._processes: list[CudaProcess] = []
        self._map: dict[str, str] = {}
        self._given_up: dict[int, float] = {}  # pids of which some call may still happen, since when
        self._look_again = False
        with contextlib.suppress(FileNotFoundError):
            noted = json.loads(note.read_text())
            self._processes = [CudaProcess.from_dict(one) for one in noted["processes"]]
            self._map = noted["map"]
            self._given_up = {one.pid: time.monotonic() for one in self._processes}

    @property
    def processes(self) -> tuple[CudaProcess, ...]:
        return tuple(self._processes)

    def give_up(self) -> None:
        """Make a step that is under way in another thread fail."""
        with contextlib.suppress(OSError):  # closed meanwhile: it is over
            os.eventfd_write(self._cancel, 1)

    # Towards the checkpoint.

    def find(self, root: int) -> list[CudaProcess]:
        """Those below `root` that hold a GPU now."""
        gpus = {gpu.minor: gpu.uuid for gpu in self._hardware.gpus()}
        return [
            CudaProcess(pid, proctree.start_time(pid), inner(pid), _uuids(held, gpus))
            for pid, held in holders(root).items()
        ]

    def lock(self, root: int) -> None:
        """All of the tree's, also those that took to CUDA since it was looked at."""
        self._begin()
        while found := [one for one in self.find(root) if one not in self._processes]:
            self._each(found, self._state)  # those that CUDA does not know could not be undone either
            self._processes += found
            self._write()
            self._each(found, self._lock)

    def save(self, root: int) -> None:
        self._begin()
        self._each(self._processes, self._save)
        if left := {pid: held for pid, held in holders(root).items() if not proctree.dead(pid)}:
            pid, held = next(iter(left.items()))
            raise CheckpointFailed(
                f"process {pid} ({proctree.read(pid, pid, 'comm')}) still holds {min(held)} after the checkpoint of "
                "its device memory",
                remedy="start processes that use no GPU by spawn or forkserver, not by fork",
            )

    def _lock(self, one: CudaProcess) -> None:
        driver = self._hardware.driver()
        if self._state(one) is not State.LOCKED:
            self._call(one, lambda: driver.lock(one.pid, LOCK_SECONDS, self._patience(LOCK_SECONDS + LOOK_SECONDS)))
        self._require(one, State.LOCKED)

    def _save(self, one: CudaProcess) -> None:
        if self._state(one) is not State.CHECKPOINTED:
            self._call(one, lambda: self._hardware.driver().checkpoint(one.pid, self._patience(MOVE_SECONDS)))
        self._require(one, State.CHECKPOINTED)

    # And back.

    def expect(self, processes: Iterable[CudaProcess], gpus: Mapping[str, str]) -> None:
        """Restored processes, checkpointed still; `gpus`: which takes the place of which, by UUID."""
        self._processes, self._map = list(processes), dict(gpus)
        self._write()

    def restore(self) -> dict[str, Any]:
        self._begin()
        self._each(self._processes, self._restore)
        return self._standing()

    def unlock(self) -> dict[str, Any]:
        self._begin()
        self._each(self._processes, self._unlock)
        standing = self._standing()
        self._look_again = False
        return standing

    def _restore(self, one: CudaProcess) -> None:
        if one.pid in self._given_up:
            self._settle(one)
        if self._state(one) is State.CHECKPOINTED:
            self._call(one, lambda: self._restore_call(one, MOVE_SECONDS))
            if self._state(one) is State.CHECKPOINTED:
                raise CudaError("restore", one.pid, "it is still checkpointed, though the call was not refused")

    def _restore_call(self, one: CudaProcess, seconds: float) -> None:
        gpus = {uuid: self._map.get(uuid, uuid) for uuid in one.gpus}
        moved = any(old != new for old, new in gpus.items())
        self._hardware.driver().restore(one.pid, gpus if moved else {}, self._patience(seconds))

    def _settle(self, one: CudaProcess) -> None:
        """Ask once more, for what is wanted anyway: calls queue, so an answer says that those before it have happened.
        A driver that does not answer is waited for, but not for ever where the process runs."""
        try:
            self._restore_call(one, SETTLE_SECONDS)
        except GivenUp:
            since = self._given_up[one.pid]
            if time.monotonic() < since + UNSETTLED_SECONDS or self._state(one) is not State.RUNNING:
                return
            log.warning("the driver does not answer for process %d, which runs: it may yet lock it", one.pid)
        except CudaError:
            pass  # it was not checkpointed, or cannot be restored yet
        del self._given_up[one.pid]
        self._look_again = True

    def _unlock(self, one: CudaProcess) -> None:
        if self._state(one) is not State.LOCKED:
            return
        self._call(one, lambda: self._hardware.driver().unlock(one.pid, self._patience(LOOK_SECONDS)))
        self._require(one, State.RUNNING)

    def _standing(self) -> dict[str, Any]:
        """`unsettled`: some call may still happen; `failed`: processes that nothing brings back."""
        failed = [one.inner for one in self._processes if one.alive() and self._state(one) is State.FAILED]
        for pid in failed:
            log.error("the GPU state of process %d is lost: the driver calls it failed", pid)
        waiting = any(one.pid in self._given_up and one.alive() for one in self._processes)
        standing: dict[str, Any] = {"unsettled": True} if waiting or self._look_again else {}
        return {**standing, "failed": failed} if failed else standing

    def require_running(self) -> None:
        """After a restore. Raises RestoreFailed."""
        for one in self._processes:
            state = self._state(one) if one.alive() else None
            if state is not State.RUNNING:
                raise RestoreFailed(f"CUDA process {one.inner} of the container is {state or 'gone'} after the restore")

    # All of them.

    def forget(self) -> None:
        """All of it runs, or is gone. Waits for a guardian's `undo`, which must touch nothing that is begun later."""
        self._processes, self._map = [], {}
        self._given_up.clear()
        with contextlib.suppress(FileNotFoundError), self._note.open() as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            self._note.unlink()

    def close(self) -> None:
        if self._cancel >= 0:
            os.close(self._cancel)
            self._cancel = -1

    def _write(self) -> None:
        new = self._note.with_name(f"{self._note.name}.new")
        env = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
        what = {"processes": [asdict(one) for one in self._processes], "map": self._map, "env": env}
        new.write_text(json.dumps(what))
        new.replace(self._note)

    def _begin(self) -> None:
        """Of a step: what gave up the one before is over."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._cancel)

    def _patience(self, seconds: float) -> Patience:
        return Patience(seconds, self._cancel)

    def _state(self, one: CudaProcess) -> State:
        return self._hardware.driver().state(one.pid, self._patience(LOOK_SECONDS))

    def _require(self, one: CudaProcess, wanted: State) -> None:
        if (state := self._state(one)) is not wanted:
            raise CheckpointFailed(f"CUDA process {one.pid} is {state}, not {wanted}, though no call was refused")

    def _call(self, one: CudaProcess, call: Callable[[], None]) -> None:
        try:
            call()
        except GivenUp:
            self._given_up.setdefault(one.pid, time.monotonic())
            raise

    def _each(self, processes: Iterable[CudaProcess], work: Callable[[CudaProcess], object]) -> None:
        """Of all that live, at once; the first error counts once all have ended."""
        alive = [one for one in processes if one.alive()]
        if not alive:
            return
        with ThreadPoolExecutor(len(alive), thread_name_prefix="cuda") as pool:
            futures = [pool.submit(work, one) for one in alive]
        errors = [(one, error) for one, future in zip(alive, futures, strict=True) if (error := future.exception())]
        for one, error in errors:
            if one.alive():
                raise error


def _uuids(held: set[str], gpus: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(gpus[minor] for minor in sorted(minors(held)) if minor in gpus)
