"""Every error that a user can meet, with the exit code of `stasis` and the CamelCase reason of a condition.

A message names what is wrong, where (rank, pid, path, digest) and, where there is one, the remedy. Code raises the
narrowest class; callers that retry decide by class (`retryable`), never by the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar


class StasisError(Exception):
    """Base of all: something Stasis could not do. `remedy` says what the user can change."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    @property
    def reason(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        return f"{self.message}. Remedy: {self.remedy}" if self.remedy else self.message


@dataclass(frozen=True)
class Finding:
    """One thing in a process tree that cannot be carried over a checkpoint."""

    cause: str
    remedy: str
    pid: int = 0
    comm: str = ""
    where: str = ""  # a descriptor ("fd 7 -> anon_inode:[io_uring]"), a path, a mapping

    def __str__(self) -> str:
        who = f"process {self.pid} ({self.comm}), " if self.pid else ""
        where = f"{self.where}: " if self.where else ""
        return f"{who}{where}{self.cause}. Remedy: {self.remedy}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Refused(StasisError):
    """The preflight found something that cannot be carried; nothing was frozen."""

    exit_code = 3

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("; ".join(str(f) for f in findings))
        self.findings = tuple(findings)


class UsageError(StasisError):
    """A wrong argument, reference or field."""

    exit_code = 2


class Unsupported(StasisError):
    """This machine lacks something that is needed; `stasis doctor` tells more."""

    exit_code = 4


class ResourceShort(StasisError):
    """Memory, disk or descriptors do not suffice; checked before anything is frozen."""

    exit_code = 5


class CheckpointFailed(StasisError):
    """A step of a checkpoint failed; the gang goes on as if nothing had been asked."""

    exit_code = 6


class RestoreFailed(StasisError):
    """A restore failed; its checkpoint is intact and stays current."""

    exit_code = 7
    retryable = True


class DeadlineExceeded(CheckpointFailed):
    """A step took longer than it may; what was frozen has been thawed."""


class Superseded(StasisError):
    """A command carried a lower epoch than one seen before: another coordinator leads now."""


class StoreError(StasisError):
    """Base of what goes wrong with stored checkpoints."""

    exit_code = 8


class NotFound(StoreError):
    """No such checkpoint, manifest or blob."""


class Corrupt(StoreError):
    """A blob's bytes are not what its digest or index says; nothing was started from it."""

    exit_code = 9


class ParentLost(StoreError):
    """Packs of the parent checkpoint vanished while they were being referred to; without the parent it succeeds."""

    retryable = True


class Unavailable(StoreError):
    """The registry cannot be reached, or answers 429 or 5xx beyond the retries."""

    retryable = True
    status = 0  # of HTTP; 0 where there was no answer
    retry_after = 0.0  # seconds that it asked for


class Denied(StoreError):
    """The registry refuses the credentials."""


class NoSpace(StoreError):
    """The registry, the folder or the disk budget is full."""


class TimedOut(StasisError):
    """The time that a command was told to wait is over; what was asked for goes on."""

    exit_code = 11
