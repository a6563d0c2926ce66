"""Lay files in a process of its own, inside the pod's cgroups: what a tmpfs holds is charged to whoever writes it.

The archive is another party's bytes, and its files are given to any user: so root reads it, but with those
capabilities alone that this takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import stasis
from stasis import errors
from stasis.agent import cgroups, privileges, proctree
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import Stats, lay
from stasis.agent.reader import wire
from stasis.errors import RestoreFailed, StasisError

NEEDED = (privileges.CHOWN, privileges.DAC_OVERRIDE, privileges.FOWNER, privileges.FSETID, privileges.SETFCAP)
SOURCES = Path(stasis.__file__).parents[1]
START = f"import sys; sys.path.insert(0, {str(SOURCES)!r}); from stasis.agent.files.worker import main; main()"


def lay_in_child(
    pid1: int,
    area: str,
    fd: int,
    record: str | os.PathLike[str],
    groups: Sequence[str],
    *,
    timeout: float | None = None,
) -> Stats:
    """As `Worker.lay`, of a child of its own."""
    with Worker() as worker:
        return worker.lay(pid1, area, fd, record, groups, timeout=timeout)


class Worker:
    """A child that will lay the files of one area. It takes a while to import what it needs, so it can be started
    ahead; it ends with this object and with this process."""

    def __init__(self) -> None:
        self._order, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", START],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
            )

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def lay(
        self,
        pid1: int,
        area: str,
        fd: int,
        record: str | os.PathLike[str],
        groups: Sequence[str],
        *,
        timeout: float | None = None,
    ) -> Stats:
        """`lay` in the child, which first joins the cgroups (their folders). `fd` gives the tar stream up to its end
        and stays the caller's, as does a writer of it, who meets a broken pipe when this fails. `record` is the list's
        path. Once only.

        Errors are those of `lay`, and RestoreFailed where the child was killed (as by the pod's memory limit) or took
        longer than `timeout` seconds.
        """
        order = {"pid1": pid1, "area": area, "record": os.fspath(record), "groups": list(groups)}
        with contextlib.suppress(OSError):  # its end tells more
            wire.send(self._order, order, [fd])
        try:
            said, complained = self._child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            self.close()
            raise RestoreFailed(f"laying the files of {area} took longer than {timeout} s") from late
        if self._child.returncode < 0:
            raise RestoreFailed(
                f"laying the files of {area} was killed by signal {-self._child.returncode}",
                remedy="see whether the container's memory limit leaves room for its files in memory",
            )
        try:
            answer = json.loads(said)
        except ValueError as error:
            raise RestoreFailed(f"laying the files of {area} failed: {complained.decode(errors='replace')}") from error
        if "error" in answer:
            raise _raised(answer["error"], answer["message"], answer["remedy"])
        return Stats(**answer)

    def close(self) -> None:
        """End it. Idempotent."""
        self._child.kill()
        self._child.communicate()
        self._order.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """The child: an order with the stream comes over descriptor 0, the outcome goes as JSON to 1."""
    with socket.socket(fileno=os.dup(0)) as source:
        try:
            order, fds = wire.receive(source, wire.MAX_REQUEST, fds=1)
        except EOFError:
            return  # nothing was to be done
    pid1, area = order["pid1"], order["area"]
    try:
        for group in order["groups"]:
            cgroups.move(os.getpid(), group)
        with LaidList(order["record"]) as laid, open(fds[0], "rb", buffering=0) as stream:
            stats = lay(pid1, area, stream, laid, opened=lambda: _confine(pid1))
        answer: dict[str, object] = dict(stats.as_dict())
    except StasisError as error:
        answer = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
    except OSError as error:
        answer = {"error": "RestoreFailed", "message": f"files of {area} cannot be laid: {error}", "remedy": ""}
    print(json.dumps(answer))


def _confine(pid1: int) -> None:
    """Attributes of trusted.* are for a container that could set them itself: they take a capability that is root's
    whole power almost."""
    privileges.limit(resource.RLIMIT_CORE, 0)
    trusted = proctree.bounding(pid1) >> privileges.SYS_ADMIN & 1
    privileges.forsake((*NEEDED, privileges.SYS_ADMIN) if trusted else NEEDED)


def _raised(name: str, message: str, remedy: str) -> StasisError:
    kind = getattr(errors, name, RestoreFailed)
    return kind(message, remedy=remedy) if issubclass(kind, StasisError) else RestoreFailed(message)
