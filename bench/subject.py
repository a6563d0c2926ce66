"""The process that is checkpointed: a workload in a container, asked over a file, and a digest of what it holds."""

from __future__ import annotations

from pathlib import Path

from stasis.agent import provision
from stasis.errors import Corrupt, StasisError
from stasis.local.container import Container
from stasis.local.gang import GangSpec, LocalGang

GIB = 1 << 30
SECONDS_PER_GIB = 400.0  # of training, on a busy machine, until the workload must have answered


class Subject:
    """A gang of one rank with the workload in it. Use as a context manager."""

    def __init__(self, kind: str, size: int, folder: Path) -> None:
        self.size = size  # bytes wanted; after the start: held
        self._control = folder / "control"
        self._number = 0
        self.digest = ""
        spec = GangSpec(
            ["python3", "/bench/workload.py", kind, str(size)],
            1,
            provision.rootfs(),
            provision.init(),
            options={"volumes": {"/control": self._control}, "readonly": {"/bench": Path(__file__).parent}},
        )
        self.gang = LocalGang(f"bench-{kind}", spec, folder / kind)

    @property
    def container(self) -> Container:
        return self.gang.places[0].container

    def __enter__(self) -> Subject:
        self._control.mkdir(parents=True, exist_ok=True)
        (self._control / "command").unlink(missing_ok=True)
        self.gang.__enter__()
        try:
            self.size = int(self._answer(0, 60 + SECONDS_PER_GIB * self.size / GIB))
            self.digest = self.ask("digest")
        except BaseException:
            self.gang.delete()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.gang.delete()

    def ask(self, verb: str) -> str:
        """Have the workload do something; its answer."""
        self._number += 1
        new = self._control / "new"
        new.write_text(f"{self._number} {verb}")
        new.rename(self._control / "command")
        return self._answer(self._number, 120 + 20 * self.size / GIB)

    def step(self) -> None:
        self.ask("step")
        self.digest = self.ask("digest")

    def check(self) -> None:
        """Raises Corrupt where what the process holds is not, bit for bit, what it held at the last step."""
        if (found := self.ask("digest")) != self.digest:
            raise Corrupt(f"the restored process holds other bytes than before: {found} is not {self.digest}")

    def replace(self) -> None:
        """Delete the container and start a placeholder."""
        self.gang.replace(new_addresses=False)

    def _answer(self, number: int, timeout: float) -> str:
        wanted = f"answer {number} "

        def found() -> str | None:
            lines = self.gang.lines[0]
            return next((line[len(wanted) :] for line in reversed(lines) if line.startswith(wanted)), None)

        self.gang.wait_for(lambda: found() is not None or self.gang.statuses()[0] is not None, timeout)
        if (answer := found()) is None:
            raise StasisError(f"the workload did not answer: {' | '.join(self.gang.lines[0][-5:])}")
        return answer
