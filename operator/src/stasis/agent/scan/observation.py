from __future__ import annotations

from dataclasses import dataclass

from stasis.agent.scan.snapshot import Process
from stasis.core.carriable import Refusal
from stasis.errors import Finding

SOON = 0.6  # seconds: what passes by (a connection to be accepted, a child on its way to exec) has passed by then


@dataclass(frozen=True)
class Observation:
    """A finding of one reading. `settles`: seconds after which it counts, if every reading until then had it."""

    finding: Finding
    settles: float = 0.0

    @classmethod
    def of(cls, process: Process, where: str, cause: str, remedy: str, *, settles: float = 0.0) -> Observation:
        return cls(Finding(cause, remedy, process.pid, process.comm, where), settles)

    @classmethod
    def refused(cls, process: Process, where: str, refusal: Refusal) -> Observation:
        return cls.of(process, where, refusal.cause, refusal.remedy)
