"""Lay files in a process of its own, inside the pod's cgroups: what a tmpfs holds is charged to whoever writes it.

The archive is another party's bytes, and its files are given to any user: so root reads it, but with those
capabilities alone that this takes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import stasis
from stasis import errors
from stasis.agent import cgroups, privileges, proctree
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import Stats, lay
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
    """`lay` in a child that first joins the cgroups (their folders). `fd` gives the tar stream up to its end and stays
    the caller's, as does a writer of it, who meets a broken pipe when this fails. `record` is the list's path.

    Errors are those of `lay`, and RestoreFailed where the child was killed (as by the pod's memory limit) or took
    longer than `timeout` seconds.
    """
    arguments = json.dumps([pid1, area, os.fspath(record), list(groups)])
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-c", START, arguments],
            stdin=fd,
            capture_output=True,
            timeout=timeout,
            env={},
        )
    except subprocess.TimeoutExpired as late:
        raise RestoreFailed(f"laying the files of {area} took longer than {timeout} s") from late
    if child.returncode < 0:
        raise RestoreFailed(
            f"laying the files of {area} was killed by signal {-child.returncode}",
            remedy="see whether the container's memory limit leaves room for its files in memory",
        )
    try:
        answer = json.loads(child.stdout)
    except ValueError as error:
        raise RestoreFailed(f"laying the files of {area} failed: {child.stderr.decode(errors='replace')}") from error
    if "error" in answer:
        raise _raised(answer["error"], answer["message"], answer["remedy"])
    return Stats(**answer)


def main() -> None:
    """The child: arguments as JSON, the stream on descriptor 0, the outcome as JSON on 1."""
    pid1, area, record, groups = json.loads(sys.argv[1])
    try:
        for group in groups:
            cgroups.move(os.getpid(), group)
        with LaidList(record) as laid, open(0, "rb", buffering=0, closefd=False) as stream:
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
