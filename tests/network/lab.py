"""Pods without a container engine: fresh namespaces joined by a switch, ranks of the load program, the real CRIU."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar

from stasis.core.connections import IpAddress

REPOSITORY = Path(__file__).resolve().parents[2]
FREEZER = Path("/sys/fs/cgroup/freezer")
BASE_PORT = 6000


def run(*command: str | Path, **keywords: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **keywords)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


@cache
def bundle() -> Path:
    return Path(run(REPOSITORY / "tools/criu.sh").splitlines()[-1])


def eventually(condition: Callable[[], object], what: str, timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def status(pid: int, key: str) -> list[str]:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return line.split()[1:]
    raise KeyError(key)


class Netns:
    """Fresh namespaces, alive until `close`; with `pid` an init of their own (a sleep)."""

    def __init__(self, *kinds: str) -> None:
        self._unshare = subprocess.Popen(["unshare", *kinds, "--fork", "--kill-child", "sleep", "infinity"])
        eventually(lambda: children(self._unshare.pid), "unshare forks")
        self.pid = children(self._unshare.pid)[0]
        eventually(lambda: Path(f"/proc/{self.pid}/comm").read_text() == "sleep\n", "the namespaces' init runs")
        self.netns_fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.ip("link", "set", "lo", "up")

    kinds: ClassVar[str] = "-n"

    def enter(self, *command: str | Path) -> list[str]:
        return ["nsenter", "-t", str(self.pid), *self.kinds.split(), "--", *map(str, command)]

    def ip(self, *arguments: str) -> str:
        return run(*self.enter("ip", *arguments))

    def python(self, code: str, *arguments: str, timeout: float = 10) -> str:
        return run(*self.enter(sys.executable, "-c", code, *arguments), timeout=timeout)

    def close(self) -> None:
        os.close(self.netns_fd)
        self._unshare.kill()
        self._unshare.wait()


class Bridge:
    """A switch of the kernel's, in a network namespace of its own."""

    def __init__(self) -> None:
        self._netns = Netns("--net")
        self._netns.ip("link", "add", "br0", "type", "bridge")
        self._netns.ip("link", "set", "br0", "up")
        self._ports = 0

    def attach(self, pod: Netns) -> None:
        port = f"port{self._ports}"
        self._ports += 1
        self._netns.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pod.pid))
        self._netns.ip("link", "set", port, "master", "br0", "up")

    def close(self) -> None:
        self._netns.close()


class SlowSwitch:
    """A switch of TAP devices that delivers each frame `delay` seconds late, so that bytes are surely in flight."""

    def __init__(self, delay: float) -> None:
        program = Path(__file__).with_name("switch.py")
        self._process = subprocess.Popen(
            [sys.executable, program, str(delay)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def attach(self, pod: Netns) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{pod.pid}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "attached\n"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Pod(Netns):
    """One rank's namespaces and freezer cgroup."""

    kinds = "-m -n -i -u -p"

    def __init__(self, switch: Bridge | SlowSwitch, addresses: Sequence[str]) -> None:
        super().__init__("--pid", "--net", "--mount", "--ipc", "--uts", "--mount-proc")
        self.freezer = FREEZER / f"stasis-net-{uuid.uuid4().hex[:8]}"
        self.freezer.mkdir()
        switch.attach(self)
        for address in addresses:
            if ":" in address:
                self.ip("addr", "add", f"{address}/64", "dev", "eth0", "nodad")
            else:
                self.ip("addr", "add", f"{address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")

    def start(self, *command: str | Path, log: Path) -> int:
        """Start a command as a child of a vanished parent, in a session of its own; its host pid."""
        # Its files are opened inside: CRIU looks them up among the mounts of the pod.
        inside = self.enter("setsid", "--fork", "sh", "-c", f'exec "$@" < /dev/null > {log} 2>&1', "sh", *command)
        run("sh", "-c", f'echo $$ > {self.freezer}/cgroup.procs; exec "$@" < /dev/null > /dev/null', "sh", *inside)
        eventually(self.tasks, f"{command} runs")
        return self.tasks()[0]

    def tasks(self) -> list[int]:
        return sorted(int(p) for p in (self.freezer / "cgroup.procs").read_text().split())

    def set_frozen(self, frozen: bool) -> None:
        state = "FROZEN" if frozen else "THAWED"
        (self.freezer / "freezer.state").write_text(state)
        eventually(lambda: (self.freezer / "freezer.state").read_text().strip() == state, state)

    def criu(self, action: str, images: Path, *options: str) -> None:
        b = bundle()
        command = [b / "ld-linux-x86-64.so.2", "--library-path", b, b / "criu", action, "--no-default-config"]
        command += ["--lib", b / "lib", "-D", images, "-W", images, "-o", f"{action}.log", "-v3"]
        command += ["--tcp-established", "--network-lock", "skip", "--manage-cgroups=ignore", *options]
        command = self.enter(*command)
        if action == "restore":  # what it restores is born in its cgroup
            command = ["sh", "-c", f'echo $$ > {self.freezer}/cgroup.procs; exec "$@"', "sh", *command]
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        log = (images / f"{action}.log").read_text() if (images / f"{action}.log").exists() else ""
        assert done.returncode == 0, f"criu {action}: {done.stderr}\n" + "\n".join(
            line for line in log.splitlines() if "Error" in line or "Warn" in line
        )

    def dump(self, images: Path, *options: str) -> None:
        """Dump the (frozen) tree; it stays frozen and alive."""
        images.mkdir(exist_ok=True)
        root = status(self.tasks()[0], "NSpid")[-1]
        self.criu("dump", images, "-t", root, "--leave-running", "--freeze-cgroup", str(self.freezer), *options)

    def restore(self, images: Path, *options: str) -> None:
        """Restore the tree, its tasks stopped."""
        run(*self.enter("sh", "-c", "echo 20000 > /proc/sys/kernel/ns_last_pid"))
        self.criu("restore", images, "-d", "-s", *options)

    def go(self) -> None:
        for pid in self.tasks():
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        if not self.freezer.exists():
            return
        for pid in self.tasks():  # before the thaw: a frozen task that is killed runs no more
            os.kill(pid, signal.SIGKILL)
        (self.freezer / "freezer.state").write_text("THAWED")
        super().close()
        eventually(lambda: not self.tasks(), "the pod's processes are gone")
        self.freezer.rmdir()


_HEAD = struct.Struct("<8Q")
_CONNECTION = struct.Struct("<8Q")


@dataclass
class Report:
    """What a rank of the load program says of itself, live."""

    path: Path
    _map: mmap.mmap | None = None

    def _memory(self) -> mmap.mmap:
        if self._map is None:
            with self.path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        return self._map

    @property
    def ready(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0 and bool(_HEAD.unpack_from(self._memory())[2])

    @property
    def steps(self) -> int:
        return int(_HEAD.unpack_from(self._memory())[4])

    def set(self, *, epoch: int | None = None, stop: bool | None = None) -> None:
        if epoch is not None:
            struct.pack_into("<Q", self._memory(), 0, epoch)
        if stop is not None:
            struct.pack_into("<Q", self._memory(), 8, int(stop))

    def connections(self) -> dict[tuple[int, int], dict[str, int]]:
        """By (peer, letter): mode, sent, received, error, epoch, first_ns."""
        memory = self._memory()
        names = ("mode", "peer", "letter", "sent", "received", "error", "epoch", "first_ns")
        rows = [
            dict(zip(names, _CONNECTION.unpack_from(memory, _HEAD.size + i * _CONNECTION.size), strict=True))
            for i in range(_HEAD.unpack_from(memory)[3])
        ]
        return {(row["peer"], row["letter"]): row for row in rows}


@dataclass
class Gang:
    """Ranks of the load program, one a pod, and the checks that nothing was lost between them."""

    folder: Path
    spec: str
    addresses: list[str]  # what the ranks call each other
    switch: Bridge | SlowSwitch
    moved: list[str] = field(default_factory=list)  # the pods' own addresses, where they are others
    aliases: dict[IpAddress, IpAddress] = field(default_factory=dict)  # addresses of earlier pods still in use
    pods: list[Pod] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    epoch: int = 0

    def start(self, load: Path, buffer: int = 131072) -> None:
        for rank, address in enumerate(self.addresses):
            self.pods.append(Pod(self.switch, [address.removeprefix("::ffff:")]))
            self.reports.append(Report(self.folder / f"report.{rank}"))
        for rank, pod in enumerate(self.pods):
            arguments = [str(rank), self.reports[rank].path, str(BASE_PORT), str(buffer), self.spec, *self.addresses]
            pod.start(load, *map(str, arguments), log=self.folder / f"log.{rank}")
        eventually(lambda: all(r.ready for r in self.reports), "the gang is connected")

    def pairs(self) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
        tables = [r.connections() for r in self.reports]
        for rank, table in enumerate(tables):
            for (peer, letter), row in table.items():
                yield f"{rank}->{peer} {chr(row['mode'])}", row, tables[peer][rank, letter]

    def errors(self) -> list[str]:
        return [f"{name}: {row['error']}" for name, row, _ in self.pairs() if row["error"]]

    def next_epoch(self) -> int:
        """Start to time what arrives from now on; the time in ns."""
        self.epoch += 1
        for report in self.reports:
            report.set(epoch=self.epoch)
        return time.time_ns()

    def gap_ms(self, since_ns: int, timeout: float = 30) -> float:
        """From `since_ns` until every busy connection has received data. Fails when one breaks, or moves nothing."""

        def busy() -> list[dict[str, int]]:
            return [row for _, row, _ in self.pairs() if chr(row["mode"]) in "pba"]

        def moving() -> bool:
            assert not self.errors()
            return all(row["epoch"] == self.epoch for row in busy())

        eventually(moving, "data moves on every connection again", timeout)
        return max((row["first_ns"] - since_ns) / 1e6 for row in busy())

    def finish(self) -> None:
        """Stop; every byte that was sent must have arrived, in order and whole."""
        for report in self.reports:
            report.set(stop=True)
        quiet = [0.0, ()]

        def settled() -> bool:
            counts = tuple((row["sent"], row["received"]) for _, row, _ in self.pairs())
            if counts != quiet[1]:
                quiet[:] = [time.monotonic(), counts]
            even = all(row["sent"] == other["received"] for _, row, other in self.pairs())
            return bool(self.errors()) or (even and time.monotonic() - float(str(quiet[0])) > 0.1)

        eventually(settled, f"both ends agree: {[(n, a['sent'], b['received']) for n, a, b in self.pairs()]}", 30)
        assert not self.errors()
        assert all(row["sent"] > 0 for name, row, other in self.pairs() if name[-1] in "pba"), "an idle test"

    def close(self) -> None:
        for pod in self.pods:
            pod.close()
        self.switch.close()
