"""The other end of a trainer's socket, for agents and tests."""

from __future__ import annotations

import json
import select
import socket
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from stasis_trainer.messages import Phase, State


class TrainerError(Exception):
    """The trainer has refused or failed a request."""


class Trainer:
    """One process. Calls wait for its answer at most `deadline` seconds each."""

    def __init__(self, path: Path, deadline: float = 60.0) -> None:
        self.path, self._deadline = path, deadline
        self._data = b""
        self._arrived: deque[dict[str, Any]] = deque()
        self.state: State | None = None  # the last one heard while armed
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(deadline)
            self._socket.connect(str(path))
            self.hello = self._next("hello")
        except BaseException:
            self._socket.close()
            raise

    @property
    def rank(self) -> int | None:
        return self.hello["rank"]  # type: ignore[no-any-return]

    @property
    def phase(self) -> Phase:
        """When the connection was made."""
        return Phase(self.hello["phase"])

    def arm(self) -> None:
        self.state = None
        self._send("arm")

    def set_targets(self, targets: dict[str, int]) -> None:
        self._send("targets", targets=targets)

    def commit(self, hold: float = 0.0) -> None:
        """No operation begins any more. Should the connection end, that holds for `hold` seconds."""
        self._ask("commit", "committed", hold=hold)

    def disarm(self) -> None:
        self._ask("disarm", "disarmed")

    def teardown(self) -> None:
        self._ask("teardown", "saved")

    def close_groups(self) -> list[str]:
        """The internet sockets that the process has left."""
        return self._ask("close", "torn")["sockets"]  # type: ignore[no-any-return]

    def begin_rebuild(
        self,
        epoch: str,
        endpoints: dict[str, tuple[str, int]] | None = None,
        environment: dict[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Endpoints by what `hello` calls the stores; an epoch is never used twice."""
        self._send("rebuild", epoch=epoch, endpoints=endpoints or {}, environment=environment or {}, timeout=timeout)

    def end_rebuild(self) -> float:
        """Seconds that it took."""
        return float(self._next("rebuilt")["seconds"])

    def resume(self) -> None:
        self._ask("resume", "resumed")

    def disconnect(self) -> None:
        self._socket.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> None:
        """Take in what has arrived while armed."""
        self._take_in()
        while self._arrived:
            message = self._arrived.popleft()
            if self._event(message) != "state":
                raise TrainerError(f"{self.path}: {message} while it is armed")

    def _ask(self, op: str, event: str, **rest: Any) -> dict[str, Any]:
        self._send(op, **rest)
        return self._next(event)

    def _send(self, op: str, **rest: Any) -> None:
        self._socket.sendall(json.dumps({"op": op, **rest}).encode() + b"\n")

    def _next(self, event: str) -> dict[str, Any]:
        end = time.monotonic() + self._deadline
        while True:
            while self._arrived:
                message = self._arrived.popleft()
                if self._event(message) == event:
                    return message
            if not select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"{self.path}: no answer within {self._deadline} s")
            self._take_in()

    def _event(self, message: dict[str, Any]) -> str:
        event = str(message["event"])
        if event == "error":
            raise TrainerError(f"{self.path}: {message['op']}: {message['message']}")
        if event == "state":
            self.state = State.of(message)
        return event

    def _take_in(self) -> None:
        received = self._socket.recv(1 << 20)
        if not received:
            raise ConnectionResetError(f"{self.path}: the trainer has ended")
        *lines, self._data = (self._data + received).split(b"\n")
        self._arrived.extend(json.loads(line) for line in lines)
