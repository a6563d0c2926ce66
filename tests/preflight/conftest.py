"""Containers reduced to what a preflight reads: namespaces of their own, the real init, a small Python program."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stasis.agent.lookup import Root, children, find_root

TOOLS = Path(__file__).parents[2] / "tools"
PRELUDE = """
import ctypes, fcntl, mmap, os, select, signal, socket, struct, subprocess, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
libc = ctypes.CDLL(None, use_errno=True)
def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def unshared(flag):
    r, w = os.pipe()
    if os.fork() == 0:
        call(libc.unshare(flag))
        os.close(w)
        time.sleep(1000)
    os.close(w)
    os.read(r, 1)
    os.close(r)
def ready():
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})
"""


def until(seen: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < end, f"not seen: {what}"
        time.sleep(0.01)


class Pod:
    """One container: init as PID 1, below it the keeper and a program that says `ready` and goes on when told."""

    def __init__(self, init: Path, folder: Path, program: str) -> None:
        folder.mkdir()
        (folder / "program.py").write_text(PRELUDE + textwrap.dedent(program))
        self.folder = folder
        out, inherited = os.pipe()
        mounts = "mkdir mqueue; mount -t mqueue q mqueue; mount -t tmpfs shm /dev/shm"
        inside = f'{mounts}; ip link set lo up; exec "$@" </dev/null'  # opened inside, as runtimes do
        namespaces = ["--fork", "--kill-child", "--pid", "--mount-proc", "--ipc", "--uts", "--net"]
        command = [str(init), "run", "--deny", "none", "--volume", str(folder), "--"]
        self.process = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", inside, "sh", *command, sys.executable, "-SE", f"{folder}/program.py"],
            stdout=inherited,
            stderr=inherited,
            cwd=folder,
        )
        os.close(inherited)
        self.out = out
        self.said = ""
        self.others: list[subprocess.Popen[bytes]] = []
        self.await_ready()
        self.pid1 = children(self.process.pid)[0]
        self.root: Root = find_root(self.pid1)
        self.trainer = children(self.root.pid)[0]

    def await_ready(self) -> None:
        while "ready" not in self.said:
            assert select.select([self.out], [], [], 20)[0], f"not ready: {self.said}"
            more = os.read(self.out, 1 << 16).decode()
            assert more, f"ended: {self.said}"
            self.said += more

    def said_again(self, text: str) -> bool:
        """`text` as a line of its own, later than the word of the start."""
        if select.select([self.out], [], [], 0)[0]:
            self.said += os.read(self.out, 1 << 16).decode()
        return f"\n{text}" in self.said

    def enter(self, program: str, namespaces: str = "-m -i -u -n") -> subprocess.Popen[bytes]:
        """A process of the pod outside the tree (another container's; with `-p` what kubectl exec starts)."""
        code = PRELUDE + textwrap.dedent(program)
        process = subprocess.Popen(
            [
                "nsenter",
                "-t",
                str(self.pid1),
                f"--wd={self.folder}",
                *namespaces.split(),
                sys.executable,
                "-SE",
                "-c",
                code,
            ],
            stdout=subprocess.PIPE,
        )
        self.others.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        return process

    def finish(self) -> int:
        """Let the program go on to its end: the status that it would have had undisturbed."""
        os.kill(self.trainer, signal.SIGUSR1)
        return self.process.wait(20)

    def close(self) -> None:
        for process in self.others:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        if self.process.poll() is None:
            for child in children(self.process.pid):
                os.kill(child, signal.SIGKILL)  # PID 1: the container dies with it
            self.process.wait(20)
        os.close(self.out)


@pytest.fixture(scope="session")
def init_binary() -> Path:
    return Path(subprocess.run([TOOLS / "init.sh"], check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture
def pod(tmp_path: Path, init_binary: Path) -> Iterator[Callable[[str], Pod]]:
    """pod(PROGRAM): a container that runs it, up to its call of ready()."""
    started: list[Pod] = []

    def start(program: str) -> Pod:
        started.append(Pod(init_binary, tmp_path / f"pod{len(started)}", program))
        return started[-1]

    yield start
    for one in started:
        one.close()
