from __future__ import annotations

from dataclasses import dataclass

from stasis.agent.scan.snapshot import Process
from stasis.core.carriable import Refusal
from stasis.errors import Finding


@dataclass(frozen=True)
class Observation:
    """A finding of one reading. `settles`: it may be gone a moment later, so that one reading proves little."""

    finding: Finding
    settles: bool = False

    @classmethod
    def of(cls, process: Process, where: str, cause: str, remedy: str, *, settles: bool = False) -> Observation:
        return cls(Finding(cause, remedy, process.pid, process.comm, where), settles)

    @classmethod
    def refused(cls, process: Process, where: str, refusal: Refusal, *, settles: bool = False) -> Observation:
        return cls.of(process, where, refusal.cause, refusal.remedy, settles=settles)
