"""An agent in a process of its own, to be killed: `agent_main.py DESCRIPTION VERB POINT`.

Carries `suspend`, `checkpoint`, `restore` or `recover` out for a gang that somebody else owns, and kills itself with
SIGKILL when the step or record POINT comes (`-`: never).
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from stasis.core.plan import Timing
from stasis.errors import StasisError
from stasis.local.operator import LocalOperator


def main() -> None:
    description, verb, point = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], sys.argv[3]
    places = {
        int(rank): SimpleNamespace(
            address=place["address"],
            container=SimpleNamespace(id=place["id"], spec=SimpleNamespace(emptydirs=()), status=lambda: None),
        )
        for rank, place in description["places"].items()
    }
    spec = SimpleNamespace(command=["trainer"], ranks=len(places))
    gang = SimpleNamespace(places=places, spec=spec, folder=Path(description["folder"]))

    def on_stage(what: str) -> None:
        if what == point:
            os.kill(os.getpid(), signal.SIGKILL)

    operator = LocalOperator(gang, description["where"], timing=Timing(**description["timing"]), on_stage=on_stage)
    try:
        if verb == "recover":
            print(json.dumps([str(report.outcome) for report in operator.recover()]))
        else:
            work = {"suspend": operator.suspend, "checkpoint": operator.checkpoint, "restore": operator.restore}
            print(json.dumps(str(work[verb]().outcome)))
    except StasisError as error:
        print(json.dumps({"error": error.reason, "message": str(error)}))


if __name__ == "__main__":
    main()
