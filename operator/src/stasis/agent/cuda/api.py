"""The driver by its API: long-lived workers, since to attach to the driver takes seconds on some machines.

A worker carries out one call at a time; there are as many as calls were under way at once.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stasis.agent.criu import Journal
from stasis.agent.cuda.cli import end
from stasis.agent.cuda.driver import CudaError, Driver, Patience

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 30.0


class ApiDriver(Driver):
    """`bindings`: a folder with cuda-bindings, where they are not installed beside Stasis."""

    name = "driver API"

    def __init__(self, env: Mapping[str, str], bindings: str, *, journal: Journal) -> None:
        self._env = dict(env)
        self._command = [sys.executable, "-B", str(WORKER), *([bindings] if bindings else [])]
        self._journal = journal
        self._idle: list[_Worker] = []

    def probe(self) -> None:
        """Raises CudaError where it cannot be used on this node."""
        self._idle.append(self._worker())

    def call(self, call: str, pid: int, patience: Patience, arguments: Mapping[str, object]) -> str:
        worker = self._worker()
        try:
            answer = worker.ask({"call": call, "pid": pid, **arguments}, patience)
        except BaseException:
            worker.end()
            raise
        if answer is None:
            worker.end()
            patience.give_up(call, pid)
        self._idle.append(worker)
        if "error" in answer:
            raise CudaError(call, pid, answer["error"])
        return answer["value"]

    def _worker(self) -> _Worker:
        with contextlib.suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.alive():
                    return worker
                worker.end()
        return _Worker(self._command, self._env, self._journal)

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().end()


class _Worker:
    def __init__(self, command: list[str], env: Mapping[str, str], journal: Journal) -> None:
        self._child = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._journaled = contextlib.ExitStack()
        self._journaled.enter_context(journal(self._child.pid))
        hello = self._line(Patience(START_SECONDS))
        if hello is None or "error" in hello:
            self.end()
            cause = "the driver does not answer" if hello is None else hello["error"]
            raise CudaError("start", self._child.pid, cause)

    def alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, request: Mapping[str, object], patience: Patience) -> dict[str, str] | None:
        """None: no answer in time."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return {"error": "the worker has ended"}
        return self._line(patience)

    def _line(self, patience: Patience) -> dict[str, str] | None:
        assert self._child.stdout is not None
        if not patience.wait(self._child.stdout.fileno()):
            return None
        line = self._child.stdout.readline()
        return dict(json.loads(line)) if line else None  # it ended amid the call: that may still happen

    def end(self) -> None:
        end(self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._journaled.close()
