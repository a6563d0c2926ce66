"""Carries one rank's steps out, whatever the protocol asks for and whenever."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stasis.agent import kept, stored
from stasis.agent.checkpoint import CheckpointRank
from stasis.agent.journal import StateDir
from stasis.agent.node import Node
from stasis.agent.restore import RestoreRank
from stasis.core import machine as m
from stasis.core.driver import Reply
from stasis.core.plan import PLANS
from stasis.core.records import Failure
from stasis.core.steps import Step
from stasis.errors import Corrupt, Denied, Refused, StasisError, UsageError
from stasis.store.media import Descriptor

WAKE = (Step.UNLOCK_NETWORK, Step.THAW)  # they do not wait for a store that hangs
FINAL = (Refused, Corrupt, Denied, UsageError)  # another attempt of a restore would meet the same
FIRST = {plan[0].step for plan in PLANS.values()}


class RankExecutor:
    """Carries one rank's steps out, one at a time, each in a thread. `status()` tells how the rank's container ended.

    What the first step was told is journaled, so that a restarted agent can undo what an earlier one began.
    """

    def __init__(
        self,
        node: Node,
        state: StateDir,
        rank: int,
        *,
        status: Callable[[], int | None] = lambda: None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._node = node
        self._state = state
        self._rank = rank
        self._status = status
        self._progress = progress
        self._worker: CheckpointRank | RestoreRank | None = None
        self._key = ""
        self._threads: dict[threading.Thread, Step] = {}  # those at work
        self._watcher: threading.Thread | None = None
        self._over = os.eventfd(0, os.EFD_CLOEXEC)

    @property
    def worker(self) -> CheckpointRank | RestoreRank | None:
        return self._worker

    def close(self) -> None:
        """The operation is over: how the tree ends is nobody's business any more."""
        os.eventfd_write(self._over, 1)
        if self._watcher is not None:
            self._watcher.join()
        os.close(self._over)

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None:
        at_work = list(self._threads.items())
        if at_work and self._worker is not None:
            self._worker.give_up()
        before = [thread for thread, what in at_work if what is not Step.STORE or step not in WAKE]
        thread = threading.Thread(
            target=self._run,
            args=(step, f"{op}.{self._rank}.{attempt}", args, token, limit, reply, before),
            name=f"rank-{self._rank}:{step}",
            daemon=True,
        )
        self._threads[thread] = step
        thread.start()

    def _run(
        self,
        step: Step,
        key: str,
        args: Mapping[str, Any],
        token: int,
        limit: float,
        reply: Reply,
        before: list[threading.Thread],
    ) -> None:
        for thread in before:
            thread.join()
        limiter = threading.Timer(limit, lambda: self._worker and self._worker.give_up())
        limiter.daemon = True
        limiter.start()
        try:
            worker = self._worker_for(key, step, args)
            result = worker.run(step, args)
            if step is Step.PREPARE and isinstance(worker, CheckpointRank):
                self._watch(worker, reply)
            end: m.StepDone | m.StepFailed = m.StepDone(token, result)
        except StasisError as error:
            again = not isinstance(error, FINAL)
            end = m.StepFailed(token, Failure.of(error, rank=self._rank, step=step, retryable=again))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            end = m.StepFailed(token, Failure(type(error).__name__, text, rank=self._rank, step=step))
        limiter.cancel()
        del self._threads[threading.current_thread()]  # before it is told: nobody gives up what is done
        reply(end)

    def _worker_for(self, key: str, step: Step, args: Mapping[str, Any]) -> CheckpointRank | RestoreRank:
        if self._worker is not None and self._key == key:
            return self._worker
        journaled = self._state.read("job", key)
        if journaled is None:
            journaled = {"step": step, "args": dict(args)}
            self._state.write("job", key, journaled)
        first = Step(journaled["step"])
        self._key = key
        if first is Step.PREPARE:
            self._worker = CheckpointRank(self._node, self._progress, self._announce)
        else:
            self._worker = RestoreRank(self._node)
        if step not in FIRST:
            self._worker.recover(journaled["args"])
        return self._worker

    def _announce(self, manifest: Descriptor) -> None:
        assert self._worker is not None
        job = self._worker.job
        if job.local:
            kept.announce(self._state, job, manifest.digest)
        store = kept.store_of(job, self._state.path)
        stored.announce(self._state, job.uid, job.rank, store, manifest.digest)

    def _watch(self, worker: CheckpointRank, reply: Reply) -> None:
        """Tell when the tree ends by itself."""
        _, root, _ = worker.tree

        def wait() -> None:
            with contextlib.ExitStack() as opened, contextlib.suppress(ProcessLookupError):  # it is gone already
                pidfd = os.pidfd_open(root.pid)
                opened.callback(os.close, pidfd)
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.register(self._over, select.POLLIN)
                if self._over in dict(poll.poll()):
                    return
            time.sleep(0.2)  # init takes a moment to pass the status on
            status = self._status()
            reply(m.TreeExited(-1 if status is None else status))

        self._watcher = threading.Thread(target=wait, name=f"rank-{self._rank}:watch", daemon=True)
        self._watcher.start()
