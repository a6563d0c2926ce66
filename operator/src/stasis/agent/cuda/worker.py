"""A process that calls the driver API (cuda-bindings) for the agent, and can be killed when a call hangs.

`python worker.py [FOLDER]`: FOLDER is searched for cuda-bindings too. One JSON object a line, `{"call", "pid", ...}` in
and `{"value"}` or `{"error"}` out; the first line out says whether the driver is there. Nothing of Stasis is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any


class Refused(Exception):
    pass


def checked(driver: Any, answer: tuple[Any, ...]) -> Any:
    code, *values = answer
    if int(code):
        _, text = driver.cuGetErrorString(code)
        raise Refused(text.decode() if text else f"error {int(code)}")
    return values[0] if values else None


def uuid(driver: Any, text: str) -> Any:
    import ctypes

    made = driver.CUuuid()
    ctypes.memmove(made.getPtr(), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
    return made


def carry_out(driver: Any, request: dict[str, Any]) -> str:
    pid = int(request["pid"])
    match request["call"]:
        case "get-state":
            state = checked(driver, driver.cuCheckpointProcessGetState(pid))
            return str(driver.CUprocessState(state).name.removeprefix("CU_PROCESS_STATE_").lower())
        case "get-restore-tid":
            return str(checked(driver, driver.cuCheckpointProcessGetRestoreThreadId(pid)))
        case "lock":
            lock = driver.CUcheckpointLockArgs()
            lock.timeoutMs = int(request["timeout"])
            checked(driver, driver.cuCheckpointProcessLock(pid, lock))
        case "checkpoint":
            checked(driver, driver.cuCheckpointProcessCheckpoint(pid, None))
        case "restore":
            restore, pairs = driver.CUcheckpointRestoreArgs(), []
            for old, new in request.get("gpus", {}).items():
                pair = driver.CUcheckpointGpuPair()
                pair.oldUuid, pair.newUuid = uuid(driver, old), uuid(driver, new)
                pairs.append(pair)
            if pairs:
                restore.gpuPairs, restore.gpuPairsCount = pairs, len(pairs)
            checked(driver, driver.cuCheckpointProcessRestore(pid, restore))
        case "unlock":
            checked(driver, driver.cuCheckpointProcessUnlock(pid, None))
        case other:
            raise Refused(f"no such call: {other}")
    return ""


def main() -> None:
    sys.path[1:1] = sys.argv[1:]

    def say(**answer: str) -> None:
        print(json.dumps(answer), flush=True)

    try:
        from cuda.bindings import driver

        checked(driver, driver.cuInit(0))
    except Exception as error:
        say(error=str(error))
        return
    say(value="ready")
    for line in sys.stdin:
        try:
            say(value=carry_out(driver, json.loads(line)))
        except Exception as error:
            say(error=str(error))


if __name__ == "__main__":
    main()
