"""A program that gives CUDA processes their devices back when the agent that has locked them is gone: `undo NOTE`."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

from stasis.agent.cuda.devices import Devices
from stasis.agent.cuda.hardware import Hardware
from stasis.errors import StasisError

RETRY_SECONDS = 1.0


def undo(note: Path) -> None:
    """Until nothing can happen any more. Whoever forgets the note waits for this (`Devices.forget`)."""
    try:
        fd = os.open(note, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    fcntl.flock(fd, fcntl.LOCK_EX)
    if os.fstat(fd).st_nlink == 0:
        return  # forgotten meanwhile
    os.environ.update(json.loads(note.read_text())["env"])
    devices = Devices(Hardware(), note)
    while True:
        try:
            standings = [devices.restore(), devices.unlock()]
            if not any(standing.get("unsettled") for standing in standings):
                return
        except StasisError as error:
            print(error, file=sys.stderr, flush=True)
        time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    undo(Path(sys.argv[1]))
