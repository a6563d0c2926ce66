"""A container with a tree to freeze, and agents and guardians that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.guardian.conftest import ROOTS, Container, try_rmdir, wait

from stasis.agent import proctree
from stasis.agent.freezer import Freezer
from stasis.agent.journal import StateDir
from stasis.agent.network import lock
from stasis.agent.records import Records
from stasis.core.records import Record, Verdict, decision_key, release_key

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "operator" / "src"


class Bench:
    """A container with a tree, a state folder, and agents that can be killed."""

    def __init__(self, box: Container, path: Path, version: str) -> None:
        self.box = box
        self.path = path
        self.version = version
        self.state = StateDir(path / "state")
        self.records = Records(path / "records")
        self.netns = os.open(f"/proc/{box.pid1}/ns/net", os.O_RDONLY)
        self.agents: list[subprocess.Popen[str]] = []

    def agent(
        self, *words: str, seconds: float = 600.0, prefix: tuple[str, ...] = (), path: str = str(SOURCE)
    ) -> subprocess.Popen[str]:
        """An agent that has done `words`."""
        box = self.box
        arguments = (self.path / "state", self.path / "records", box.pid1, box.root, self.version, seconds)
        agent = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "agent.py"), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.agents.append(agent)
        assert self.answer(agent) == "ready"
        for word in words:
            assert self.tell(agent, word) == "done", word
        return agent

    def tell(self, agent: subprocess.Popen[str], word: str) -> str:
        assert agent.stdin is not None
        agent.stdin.write(word + "\n")
        agent.stdin.flush()
        return self.answer(agent)

    @staticmethod
    def answer(agent: subprocess.Popen[str]) -> str:
        assert agent.stdout is not None
        return agent.stdout.readline().strip()

    def kill(self, agent: subprocess.Popen[str]) -> None:
        agent.kill()
        agent.wait()

    @property
    def freezer(self) -> Freezer:
        return Freezer(str(self.box.groups[self.version] / "stasis"), self.version)  # type: ignore[arg-type]

    def frozen(self) -> bool:
        with self.freezer as freezer:
            return freezer.state() == "frozen"

    def free(self) -> bool:
        """Thawed and unlocked."""
        with self.freezer as freezer:
            return freezer.state() == "thawed" and not lock.is_locked(self.netns)

    def guardians(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if b"guardian_main" in command and str(self.path).encode() in command:
                    found.append(int(entry.name))
        return found

    def decide(self, verdict: Verdict) -> None:
        key = release_key if verdict in (Verdict.RELEASE, Verdict.CONTINUE) else decision_key
        self.records.create(key("8a5e"), Record(verdict, "8a5e", 1))

    def log(self) -> str:
        return self.state.log_text("8a5e.0")

    def close(self) -> None:
        for agent in self.agents:
            self.kill(agent)
            agent.stdin.close()  # type: ignore[union-attr]
            agent.stdout.close()  # type: ignore[union-attr]
        end_guardians(self)
        os.close(self.netns)
        self.state.close()
        self.records.close()
        assert try_rmdir(ROOTS["v2"] / "stasis-guardian")


def kill_guardian(bench: Bench) -> int:
    (pid,) = bench.guardians()
    end_guardians(bench)
    return pid


def end_guardians(bench: Bench) -> None:
    pids = bench.guardians()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait(lambda: all(proctree.dead(pid) for pid in pids))
