"""The thread that an agent talks to over a UNIX socket, one agent at a time."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from stasis_trainer import sockets
from stasis_trainer.gate import GATE, Busy
from stasis_trainer.messages import VERSION, Phase

LOOK = 0.001  # seconds between two looks at the state while armed
REBUILD = 60.0  # seconds to wait for peers that do not come


class Groups(Protocol):
    """The module `groups`; there is none in a process whose torch is left untouched."""

    def teardown(self) -> None: ...
    def close(self) -> None: ...
    def rebuild(self, epoch: str, endpoints: dict[str, Any], environment: dict[str, str], timeout: float) -> None: ...
    def stores(self) -> list[dict[str, Any]]: ...


class Wrong(Exception):
    """A request that this process cannot carry out in its phase."""


class Control:
    def __init__(self, folder: Path, torch: str, groups: Groups | None) -> None:
        self._folder, self._torch, self._groups = folder, torch, groups
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._hold_until = 0.0

    def start(self) -> None:
        path = self._folder / f"{os.getpid()}.sock"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(4)
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), daemon=True, name="stasis-control").start()

    def forget(self) -> None:
        """In a forked child, where the thread does not run. What is copied here would keep the parent's open."""
        for copy in (self._listener, self._connection):
            if copy:
                copy.close()
        self._listener = self._connection = None

    @property
    def started(self) -> bool:
        return self._listener is not None

    def _serve(self, listener: socket.socket) -> None:
        while True:
            if not self._wait_for_agent(listener):
                GATE.open()
                continue
            self._connection, _ = listener.accept()
            try:
                with self._connection:
                    self._converse(self._connection)
            except (OSError, ValueError):
                pass  # the agent is gone, or is none
            except Exception:
                traceback.print_exc()
            self._connection = None
            if GATE.phase is Phase.ARMED or (GATE.phase is Phase.COMMITTED and time.monotonic() > self._hold_until):
                GATE.open()

    def _wait_for_agent(self, listener: socket.socket) -> bool:
        """False when nobody came back in time to a process that was committed and is not torn down."""
        held = GATE.phase is Phase.COMMITTED
        left = max(0.0, self._hold_until - time.monotonic()) if held else None
        return bool(select.select([listener], [], [], left)[0])

    def _converse(self, agent: socket.socket) -> None:
        def say(event: str, **rest: Any) -> None:
            agent.sendall(json.dumps({"event": event, **rest}).encode() + b"\n")

        state = GATE.state()
        say(
            "hello",
            version=VERSION,
            pid=os.getpid(),
            torch=self._torch,
            phase=GATE.phase.value,
            stores=self._groups.stores() if self._groups else [],
            **state.as_json(),
        )
        data, last = b"", None
        while True:
            armed = GATE.phase is Phase.ARMED
            if select.select([agent], [], [], LOOK if armed else None)[0]:
                received = agent.recv(1 << 16)
                if not received:
                    return
                *lines, data = (data + received).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if request["op"] == "arm":
                        last = None
                    self._answer(request, say)
            if GATE.phase is Phase.ARMED:
                state = GATE.state()
                if state != last:
                    last = state
                    say("state", **state.as_json())

    def _answer(self, request: dict[str, Any], say: Callable[..., None]) -> None:
        op = request["op"]
        begun = time.monotonic()
        try:
            answer = self._carry_out(op, request)
        except Exception as error:
            if not isinstance(error, (Wrong, Busy)):
                traceback.print_exc()
            say("error", op=op, message=f"{type(error).__name__}: {error}", phase=GATE.phase.value)
            return
        if answer is not None:
            event, rest = answer
            say(event, seconds=round(time.monotonic() - begun, 6), **rest)

    def _carry_out(self, op: str, request: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        if op == "arm":
            self._expect(Phase.RUNNING)
            if GATE.refused or not self._groups:
                raise Wrong("not to be checkpointed with its collectives: " + "; ".join(GATE.refused))
            GATE.arm()
            return None
        if op == "targets":
            self._expect(Phase.ARMED)
            GATE.set_targets(request["targets"])
            return None
        if op == "disarm":
            self._expect(Phase.ARMED, Phase.COMMITTED, Phase.RUNNING)
            GATE.open()
            return "disarmed", {}
        if op == "commit":
            self._expect(Phase.ARMED)
            GATE.commit()
            self._hold_until = time.monotonic() + request.get("hold", 0.0)
            return "committed", {}
        assert self._groups
        if op == "teardown":
            self._expect(Phase.COMMITTED)
            GATE.phase = Phase.TORN
            self._groups.teardown()
            return "saved", {}
        if op == "close":
            self._expect(Phase.TORN)
            self._groups.close()
            GATE.phase = Phase.CLOSED
            return "torn", {"sockets": sockets.listing()}
        if op == "rebuild":
            self._expect(Phase.CLOSED, Phase.REBUILT)
            GATE.phase = Phase.CLOSED
            self._groups.rebuild(
                request["epoch"],
                request.get("endpoints", {}),
                request.get("environment", {}),
                request.get("timeout", REBUILD),
            )
            GATE.phase = Phase.REBUILT
            return "rebuilt", {}
        if op == "resume":
            self._expect(Phase.COMMITTED, Phase.REBUILT)
            GATE.open()
            return "resumed", {}
        raise Wrong(f"no such request: {op}")

    @staticmethod
    def _expect(*phases: Phase) -> None:
        if GATE.phase not in phases:
            raise Wrong(f"this process is {GATE.phase.value}, not {' or '.join(phase.value for phase in phases)}")


_control: Control | None = None


def start(torch: str, groups: Groups | None) -> None:
    """Where the environment names a folder for the sockets."""
    global _control
    _control = Control(Path(os.environ["STASIS_COLLECTIVES"]), torch, groups)
    os.register_at_fork(after_in_child=_in_child)
    ensure_started()


def ensure_started() -> None:
    """Forked children have no thread until they join a group."""
    if _control and not _control.started:
        try:
            _control.start()
        except OSError as error:
            print(f"stasis: collectives cannot be checkpointed: no socket: {error}", file=sys.stderr)


def _in_child() -> None:
    GATE.reset()
    if _control:
        _control.forget()
    sockets.close_copies()
