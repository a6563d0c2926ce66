"""The cluster's controller as the daemon sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from tests.daemon.process import Daemon, context
from tests.support.apiserver import ApiServer

from stasis.agent.runner import BootClock, RecordsPort, Runner
from stasis.core import machine as m
from stasis.core.agreement import agreement
from stasis.core.driver import CoordinatorDriver
from stasis.core.frames import Answer, Command, Forget, Home, Progress, frame_from_dict
from stasis.core.gang import Coordinator
from stasis.core.messages import Message, Report
from stasis.core.plan import Outcome, Spec
from stasis.core.steps import Step
from stasis.kube.records import ApiRecords


class Controller:
    """The cluster's controller as the daemon sees it: coordinators over one connection, which comes back."""

    def __init__(self, daemon: Daemon, certificates: Path, api: ApiServer) -> None:
        self._daemon = daemon
        self._context = context(certificates)
        self._client = api.client()
        self._loop = asyncio.new_event_loop()
        self._outgoing: asyncio.Queue[Command | Forget] = asyncio.Queue()
        self.operations: dict[str, Operation] = {}
        self.progress: list[Progress] = []
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    await self._talk()
                await asyncio.sleep(0.05)

    async def _talk(self) -> None:
        async with aiohttp.ClientSession() as session, self._connect(session) as socket:
            writing = asyncio.create_task(self._write(socket))
            try:
                await self._read(socket)
            finally:
                writing.cancel()

    def _connect(self, session: aiohttp.ClientSession) -> Any:
        return session.ws_connect(
            f"https://127.0.0.1:{self._daemon.port}/v1/gang", ssl=self._context, server_hostname="agent.stasis.dev"
        )

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            frame = await self._outgoing.get()
            await socket.send_str(json.dumps(frame.to_dict()))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for text in socket:
            frame = frame_from_dict(json.loads(text.data))
            if isinstance(frame, Progress):
                self.progress.append(frame)
            elif isinstance(frame, Answer) and (operation := self.operations.get(frame.to)):
                operation.runner.driver.post(frame.message)

    def send(self, frame: Command | Forget) -> None:
        self._loop.call_soon_threadsafe(self._outgoing.put_nowait, frame)

    def lead(self, spec: Spec, home: Home, epoch: int) -> Operation:
        operation = Operation(self, spec, home, epoch, ApiRecords(self._client, home.namespace, home.name, home.uid))
        self.operations[operation.coordinator.address] = operation
        operation.runner.start()
        return operation

    def close(self) -> None:
        for operation in self.operations.values():
            operation.runner.stop()
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
        self._thread.join()
        self._loop.close()


class Operation:
    def __init__(self, controller: Controller, spec: Spec, home: Home, epoch: int, records: ApiRecords) -> None:
        self._controller = controller
        self._home = home
        self.spec = spec
        self.records = records
        self.reports: list[Report] = []
        self.notices: list[m.Notice] = []
        self.on_notice: Callable[[m.Notice], None] = lambda notice: None
        self.ended = threading.Event()
        self.coordinator = Coordinator(spec, epoch, agreement(spec))
        clock = BootClock()
        self.runner = Runner(
            lambda wake: CoordinatorDriver(
                self.coordinator,
                clock=clock,
                transport=self,
                records=RecordsPort(records),
                notify=self._notify,
                wake=wake,
                observe=lambda machine, event: self.reports.append(event) if isinstance(event, Report) else None,
            ),
            clock,
        )

    def send(self, to: str, message: Message) -> None:
        assert not isinstance(message, Report)
        self._controller.send(Command(to, message, self._home))

    def _notify(self, notice: m.Notice) -> None:
        self.notices.append(notice)
        self.on_notice(notice)
        if isinstance(notice, m.Ended):
            self.ended.set()

    def outcome(self, timeout: float = 60.0) -> Outcome | None:
        self.ended.wait(timeout)
        return self.coordinator.outcome

    def failures(self) -> list[str]:
        return [str(f) for notice in self.notices if isinstance(notice, m.Ended) for f in notice.failures]

    def began(self, step: Step) -> bool:
        return any(isinstance(notice, m.StageBegun) and notice.stage.step is step for notice in self.notices)
