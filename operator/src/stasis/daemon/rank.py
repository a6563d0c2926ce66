"""One rank of this node in one operation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stasis.agent.executor import RankExecutor
from stasis.agent.node import Job
from stasis.agent.runner import Runner
from stasis.core import machine as m
from stasis.core.driver import Reply
from stasis.core.frames import Home
from stasis.core.member import Member
from stasis.core.membership import State
from stasis.core.plan import PLANS
from stasis.core.steps import Step
from stasis.daemon.releases import Releases


@dataclass
class Rank:
    """One rank in one operation. `job` is what its first step was told, None before that."""

    op: str
    rank: int
    home: Home
    job: Job | None = None
    runner: Runner | None = None
    leaving: threading.Event = field(default_factory=threading.Event)
    told: float = 0.0  # when its progress was told, seconds of time.monotonic
    stored: int = 0  # bytes

    @property
    def key(self) -> str:
        return f"{self.op}.{self.rank}"

    @property
    def member(self) -> Member:
        assert self.runner is not None
        assert isinstance(self.runner.driver.machine, Member)
        return self.runner.driver.machine

    @property
    def step(self) -> str:
        """The one that it carries out."""
        member = self.member
        if member.state is State.FINISHING and member.todo:
            return member.todo[0]
        return PLANS[member.kind][max(member.begun, 0)].step

    @property
    def context(self) -> dict[str, Any]:
        """Of its log lines."""
        return {
            "namespace": self.home.namespace,
            "job": self.home.name.rpartition("-")[0],
            "checkpoint": self.home.name,
            "operation": self.op,
            "rank": self.rank,
        }


class Steps:
    """A rank's steps, as the protocol asks for them: the release of one in a pod waits until that ends."""

    def __init__(self, releases: Releases, rank: Rank, executor: RankExecutor) -> None:
        self._releases = releases
        self._rank = rank
        self._executor = executor

    def start(
        self, step: Step, op: str, attempt: int, args: Mapping[str, Any], token: int, limit: float, reply: Reply
    ) -> None:
        pod = self._rank.job.pod if self._rank.job else None
        if step is not Step.RELEASE or self._rank.job is None or pod is None:
            self._executor.start(step, op, attempt, args, token, limit, reply)
            return

        def answered(event: m.Event) -> None:
            if isinstance(event, m.StepDone):
                self._releases.done(self._rank.key)
            reply(event)

        self._releases.hold(
            self._rank.key,
            pod,
            self._rank.job.container_id,
            lambda: self._executor.start(step, op, attempt, args, token, limit, answered),
        )
