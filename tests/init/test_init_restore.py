"""The keeper's tree through a real dump and a real restore under another init: as often as one likes, with every
property that the keeper has, and the trainer's end at the end."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import TOOLS, Init, children, status, until

pytestmark = [pytest.mark.root, pytest.mark.criu]
Start = Callable[..., Init]
Write = Callable[[str, str], None]

# Each line of its input is an order. Prints its pid each time, so that a new start shows.
TRAINER = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *a: (print("TERM by", os.getpid(), flush=True), os._exit(3)))
while True:
    with open(sys.argv[1]) as orders:
        for order in orders:
            print(order.strip(), "by", os.getpid(), flush=True)
            if order.startswith("exit"): sys.exit(int(order[5:]))
            if order.startswith("die"): os.kill(os.getpid(), int(order[4:]))
            if order.startswith("run"): os.system(order[4:])
"""


ORPHANS = {
    "in the trainer's session": "(sleep 300 &)",
    "in a session of its own": "(setsid sleep 300 &)",
    "in a session whose leader is gone": "setsid sh -c '(sleep 300 &)'",
    "in the session of another orphan": "setsid sh -c '(sleep 300 &); exec sleep 300' &",
}


@pytest.fixture(scope="session")
def bundle() -> Path:
    if given := os.environ.get("STASIS_CRIU"):
        return Path(given)
    return Path(subprocess.run([TOOLS / "criu.sh"], check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture(scope="session")
def shim() -> Path:
    return Path(subprocess.run([TOOLS / "prlimit_shim.sh"], check=True, capture_output=True, text=True).stdout.strip())


def criu(bundle: Path, preload: Path, container: Init, images: Path, *arguments: str) -> None:
    images.mkdir(exist_ok=True)
    fds = [os.open(path, os.O_PATH) for path in (bundle, images, preload)]
    tools, where, library = (f"/proc/self/fd/{fd}" for fd in fds)
    argv = ["nsenter", "-t", str(container.pid), "-m", "-n", "-i", "-u", "-p", "--"]
    argv += [
        f"{tools}/ld-linux-x86-64.so.2",
        "--library-path",
        tools,
        "--preload",
        library,
        f"{tools}/criu",
        *arguments,
    ]
    argv += ["--no-default-config", "--lib", f"{tools}/lib", "-D", where, "-o", "log", "-v4", "--manage-cgroups=ignore"]
    try:
        done = subprocess.run(argv, pass_fds=fds, env={}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + (images / "log").read_text()[-3000:]
    finally:
        for fd in fds:
            os.close(fd)


def tree(container: Init) -> list[tuple[str, ...]]:
    """All below the keeper, and whatever else PID 1 has for a child: pid, parent, session, name; pids as inside."""
    todo, found = [(pid, "1") for pid in children(container.pid)], []
    while todo:
        pid, parent = todo.pop()
        if seen := status(pid):
            inner, session = (seen[key].split()[-1] for key in ("NSpid", "NSsid"))
            found.append((inner, parent, session, seen["Name"]))
            todo += [(child, inner) for child in children(pid)]
    return sorted(found)


class Lives:
    """One trainer through several containers."""

    def __init__(self, start: Start, write: Write, criu: Callable[..., None], folder: Path, wrap: str) -> None:
        self.start, self.write, self.criu, self.folder = start, write, criu, folder
        self.orders = folder / "orders"
        os.mkfifo(self.orders)
        self.orders.chmod(0o666)
        self.giving = os.open(self.orders, os.O_RDWR)  # never blocks
        self.images = 0
        self.container = start("run", "/usr/bin/python3", "-c", TRAINER, self.orders, wrap=wrap)
        self.out = self.container.out
        self.order("hello")
        self.inner = int(status(self.container.keeper)["NSpid"].split()[-1])

    def tell(self, order: str) -> None:
        os.write(self.giving, f"{order}\n".encode())

    def order(self, text: str) -> None:
        self.tell(text)
        self.says(text)

    def says(self, text: str) -> None:
        until(lambda: f"{text} by" in self.out.read_text(), text)

    def move(self) -> int:
        """Dump, release, restore into a fresh placeholder; the exit status of the container that is left."""
        self.images += 1
        images = self.folder / f"images{self.images}"
        self.criu(self.container, images, "dump", "--leave-stopped", "-t", str(self.inner))
        self.write("word", "released")
        os.kill(self.container.keeper, signal.SIGKILL)
        left = self.container.wait()
        (self.folder / "volume" / "word").unlink()
        self.container = self.start("wait", "sh", "-c", "exit 99")
        self.container.says("waiting")
        inside = [
            "nsenter",
            "-t",
            str(self.container.pid),
            "-p",
            "sh",
            "-c",
            "echo 20000 >/proc/sys/kernel/ns_last_pid",
        ]
        subprocess.run(inside, check=True)
        self.criu(self.container, images, "restore", "-d")
        self.write("word", f"restored {self.inner}")
        until(lambda: status(self.container.pid)["Name"] == "stasis-init", "the adoption")
        return left


@pytest.fixture
def begin(start: Start, write: Write, bundle: Path, shim: Path, tmp_path: Path) -> Iterator[Callable[..., Lives]]:
    begun: list[Lives] = []

    def one(wrap: str = "") -> Lives:
        begun.append(Lives(start, write, functools.partial(criu, bundle, shim), tmp_path, wrap))
        return begun[-1]

    yield one
    for lives in begun:
        os.close(lives.giving)


@pytest.fixture
def lives(begin: Callable[..., Lives]) -> Lives:
    return begin()


def test_three_moves_then_the_trainers_exit_code(lives: Lives) -> None:
    for cycle in range(3):
        assert lives.move() == 143
        lives.order(f"cycle{cycle}")
    pids = {line.split()[-1] for line in lives.out.read_text().splitlines()}
    assert len(pids) == 1  # one process all along
    lives.tell("exit 5")
    assert lives.container.wait() == 5


def test_a_restored_keeper_is_a_keeper(lives: Lives) -> None:
    lives.move()
    run = lives.container
    assert children(run.pid) == [run.keeper]
    keeper = run.keeper
    assert status(keeper)["Name"] == "stasis-keeper"
    assert int(status(keeper)["Seccomp_filters"]) == 1
    assert sorted(os.listdir(f"/proc/{keeper}/fd")) == ["0", "1", "2"]
    lives.order("run (sleep 300 &)")
    until(lambda: len(children(keeper)) == 2, "a new orphan below the keeper")
    (orphan,) = set(children(keeper)) - {run.trainer}
    os.kill(orphan, signal.SIGKILL)
    until(lambda: orphan not in children(keeper), "the orphan reaped")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 3
    assert "TERM by" in lives.out.read_text()


@pytest.mark.parametrize("make", ORPHANS.values(), ids=ORPHANS.keys())
def test_orphans_stay_in_the_tree(lives: Lives, make: str) -> None:
    lives.order(f"run {make}")
    wanted = sorted(["stasis-keeper", "python3", *["sleep"] * make.count("sleep")])
    until(lambda: sorted(name for *_, name in tree(lives.container)) == wanted, "the orphans alone")
    before = tree(lives.container)
    for _ in range(2):
        lives.move()
        assert tree(lives.container) == before


def test_a_trainer_of_another_user(begin: Callable[..., Lives]) -> None:
    wrap = "setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set -all --inh-caps -all"
    lives = begin(wrap)
    lives.move()
    run = lives.container
    assert status(run.trainer)["Uid"].split() == ["1000"] * 4
    lives.tell("exit 5")
    assert run.wait() == 5


def test_a_restored_trainer_killed_by_a_signal(lives: Lives) -> None:
    lives.move()
    lives.tell("die 11")
    assert lives.container.wait() == 128 + 11


def test_a_restored_trainer_that_ends_well_is_a_success(lives: Lives) -> None:
    lives.move()
    lives.tell("exit 0")
    assert lives.container.wait() == 0
