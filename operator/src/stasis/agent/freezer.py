"""Freeze, thaw and kill a trainer's process tree by a control group of its own.

The tree lives in a child group of its container's, so that init, probes and exec stay alive, and CRIU dumps it there
(`--freeze-cgroup`, `--leave-running`) without ever waking it. Only the freezer's hierarchy is touched: limits and
accounting of the container stay as they are. Freezing without a living guardian is the caller's mistake: a killed
agent leaves the group frozen for ever.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Self

from stasis.agent import cgroups, proctree
from stasis.errors import CheckpointFailed, DeadlineExceeded, Unsupported, UsageError

Version = Literal["v1", "v2"]
State = Literal["thawed", "freezing", "frozen"]
HIERARCHY: dict[Version, str] = {"v1": "freezer", "v2": ""}
V1_STATES: dict[str, State] = {"THAWED": "thawed", "FREEZING": "freezing", "FROZEN": "frozen"}

# Where the kernel parks a task that it has frozen on its way to user space, by v1 and by v2.
PARKED = frozenset({"__refrigerator", "do_freezer_trap", "get_signal"})

EXACT = 0.2  # seconds in which what is left outside must be caught while the rest is frozen


class GroupGone(CheckpointFailed):
    """The tree's cgroup vanished, or was never made: its container was deleted, nothing is left to freeze or thaw."""


def now() -> float:
    """Seconds of CLOCK_BOOTTIME: goes on while the machine sleeps and ignores the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Freezer:
    """The freezer group of one tree. Holds a descriptor of its folder once it exists; closed by `close` or `with`."""

    def __init__(self, path: str, version: Version) -> None:
        self.path = path
        self.version = version
        self.nested: dict[int, str] = {}  # pid -> group that `gather` took it from, where not the container's own
        self._root: int | None = None
        self._fd: int | None = None

    @classmethod
    def of(cls, pid1: int, *, version: Version | None = None, container_id: str = "") -> Freezer:
        """The freezer of the container whose PID 1 this is; its group is made by `gather`.

        `version`: default is the environment's STASIS_FREEZER, else v2 where the container has a v2 group of its own
        (CRIU cannot attach to a task that a signal has stopped and v1 has frozen), else v1 where there is one. A
        container that shares its group with others (v2 on a hybrid machine: the root, or its runtime's) gets one named
        by its id.
        Raises CheckpointFailed where the container is gone, Unsupported where the hierarchy is not to be had.
        """
        try:
            groups = cgroups.membership(pid1)
        except ProcessLookupError as gone:
            raise CheckpointFailed(f"PID 1 of the container is gone (process {pid1})") from gone
        mounts = cgroups.hierarchies()
        own = "" in mounts and _own(groups.get("", "/"), container_id)
        version = version or _version_set() or ("v1" if "freezer" in groups and not own else "v2")
        hierarchy = HIERARCHY[version]
        mount, group = mounts.get(hierarchy), groups.get(hierarchy)
        if mount is None or group is None:
            raise Unsupported(f"the cgroup {version} freezer is not mounted here", remedy="mount the host's cgroups")
        if group.startswith("/.."):
            raise Unsupported(
                f"the container's cgroup is outside of the agent's cgroup namespace ({group})",
                remedy="run the agent in the host's cgroup namespace",
            )
        name = "stasis" if _own(group, container_id) else f"stasis-{container_id or f'pid{pid1}'}"
        return cls(f"{mount}{group.rstrip('/')}/{name}", version)

    @property
    def fd(self) -> int:
        """Descriptor of the group's folder: CRIU reaches it as /proc/self/fd/N from inside the container."""
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError as gone:
                raise self._gone() from gone
        return self._fd

    def create(self) -> None:
        """Make the group, empty, where it is not there: what is restored can then be born in it."""
        try:
            os.mkdir(self.path)
        except FileExistsError:
            pass
        except FileNotFoundError as gone:
            raise self._gone() from gone

    def gather(self, root: int, timeout: float = 10.0) -> set[int]:
        """Move the tree below and including `root` into the group; returns the pids there. Idempotent.

        Repeated until nothing of the tree is outside: a child is born in its parent's group, so that only children
        of processes not yet moved are left for the next round. Raises CheckpointFailed where the root is gone, or
        the tree multiplies faster than it can be moved for `timeout` seconds.
        """
        self.create()
        self._root = root
        return self._collect(now() + timeout, exact=False)

    def freeze(self, timeout: float = 30.0) -> set[int]:
        """Freeze and wait until every task is frozen; returns the pids. Idempotent.

        Once all is frozen the tree is walked again: only then can the walk be exact (`_collect`). Raises
        DeadlineExceeded naming the tasks that did not freeze in `timeout` seconds; the group is thawed again then.
        """
        end = now() + timeout
        try:
            while True:
                self._request(frozen=True)
                pause = 0.0005
                while self.state() != "frozen":
                    if now() > end:
                        raise DeadlineExceeded(f"{self._thaw_and_blame()} did not freeze within {timeout:g} s")
                    time.sleep(pause)
                    pause = min(pause * 2, 0.02)
                    self._request(frozen=True)  # v1 may stay FREEZING until it is asked again
                pids = self.pids()
                if self._root is None:
                    return pids
                try:
                    if self._collect(min(end, now() + EXACT), exact=True) <= pids:
                        return pids
                except DeadlineExceeded:
                    # Something outside forks on and on, and its dead pile up below the frozen root.
                    if now() > end:
                        raise
                    self.thaw()
                    self._collect(end, exact=False)
        except BaseException:
            self.thaw()
            raise

    def thaw(self) -> None:
        """Let the tree run. Idempotent, also where the group is gone. A container paused by someone else stays so."""
        try:
            self._request(frozen=False)
        except GroupGone:
            pass

    def state(self) -> State:
        """What the tree is, by this group or by one above it. An empty group is frozen as soon as it is asked to be."""
        if self.version == "v1":
            return V1_STATES[self._read("freezer.state").strip()]
        if "frozen 1" in self._read("cgroup.events").splitlines():
            return "frozen"
        return "freezing" if self._asked() else "thawed"

    def pids(self) -> set[int]:
        """The processes in the group and in groups that they made below it; without those that only await a wait()."""
        pids = {int(pid) for text in self._each("cgroup.procs") for pid in text.split()}
        if self.version == "v2":  # there a process whose leader has ended is listed by its threads only
            threads = {int(task) for text in self._each("cgroup.threads") for task in text.split()}
            pids |= {proctree.process_of(task) for task in threads - pids} - {0}
        return pids

    def kill(self, timeout: float = 30.0) -> None:
        """End every process in the group, also forks under way, so that no instruction of a frozen one runs again.

        A frozen task with SIGKILL pending dies on its way out of the freezer. Idempotent, also where the group is
        gone. Raises DeadlineExceeded naming those that live on after `timeout` seconds (a system call that cannot be
        interrupted).
        """
        end = now() + timeout
        pause = 0.0005
        try:
            while self.pids():
                if now() > end:
                    raise DeadlineExceeded(f"{self._thaw_and_blame()} did not die within {timeout:g} s of SIGKILL")
                self._request(frozen=True)  # what runs forks no more
                for pid in self.pids():
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                self._request(frozen=False)
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        except GroupGone:
            pass

    def remove(self, timeout: float = 10.0) -> None:
        """Give the processes back to the groups that they came from and delete this one. Idempotent.

        Raises CheckpointFailed where the group is frozen: its tree is somebody's only copy.
        """
        end = now() + timeout
        try:
            while pids := self.pids():
                if self._asked():
                    raise CheckpointFailed(f"cgroup {self.path} is frozen with {len(pids)} processes: not removed")
                if now() > end:
                    raise CheckpointFailed(f"cgroup {self.path} cannot be emptied: {len(pids)} processes stay")
                for pid in pids:
                    try:
                        cgroups.move(pid, self.nested.get(pid, os.path.dirname(self.path)))
                    except ProcessLookupError:
                        pass
        except GroupGone:
            return
        self.close()
        for folder, _, _ in os.walk(self.path, topdown=False):
            _rmdir(folder, end)

    def close(self) -> None:
        """Close the descriptor of the folder; the group stays as it is."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _collect(self, end: float, *, exact: bool) -> set[int]:
        """Move what is outside until a walk finds nothing there; returns what is inside.

        A process that forks and ends between two looks of one walk hides its child from it. With all others frozen
        it cannot do so twice and leave two walks in a row alike, which is what `exact` asks for.
        """
        root = self._root
        assert root is not None
        mount = cgroups.hierarchies()[HIERARCHY[self.version]]
        inside: set[int] = set()  # empty in the first round: single threads may be elsewhere (v1), so all are moved
        before: set[int] = set()
        while True:
            tree: set[int] = set()
            moved = False
            for pid in proctree.walk(root):
                tree.add(pid)
                if pid not in inside and not proctree.dead(pid):
                    moved |= self._adopt(pid, mount)
            if not tree:
                raise CheckpointFailed(f"the root of the rank's process tree is gone (process {root})")
            if not moved and (not exact or tree == before):
                return self.pids()
            if now() > end:
                raise DeadlineExceeded(f"the process tree of {root} forks faster than it can be gathered")
            inside, before = self.pids(), tree

    def _adopt(self, pid: int, mount: str) -> bool:
        """Move one process into the group; False: it is there already, or gone."""
        hierarchy = HIERARCHY[self.version]
        try:
            # To look is a hundred times as fast as to move. New threads are born where their makers are.
            tasks = [cgroups.membership(f"{pid}/task/{task}")[hierarchy] for task in proctree.tasks(pid)]
            if tasks and all(mount + group == self.path for group in tasks):
                return False
            origin = (mount + cgroups.membership(pid)[hierarchy]).rstrip("/")
            cgroups.move(pid, self.path)
        except ProcessLookupError:
            return False
        except FileNotFoundError as gone:
            raise self._gone() from gone
        except OSError as refused:
            raise CheckpointFailed(
                f"process {pid} cannot be moved into cgroup {self.path}: {refused.strerror}"
            ) from None
        if origin not in (os.path.dirname(self.path), self.path) and not origin.startswith(self.path + "/"):
            self.nested[pid] = origin
        return True

    def _request(self, *, frozen: bool) -> None:
        if self.version == "v1":
            self._write("freezer.state", "FROZEN" if frozen else "THAWED")
        else:
            self._write("cgroup.freeze", "1" if frozen else "0")

    def _asked(self) -> bool:
        return self._read("freezer.self_freezing" if self.version == "v1" else "cgroup.freeze").strip() == "1"

    def _thaw_and_blame(self) -> str:
        """Thaw, and name the tasks that held up: id, name and the kernel function that they wait in.

        v1 freezes a sleeping task where it sleeps and shows it as uninterruptible: only the thaw tells it apart.
        """
        tasks = [(pid, task) for pid in sorted(self.pids()) for task in proctree.tasks(pid)]
        seen = {task: (proctree.state(pid, task), proctree.read(pid, task, "wchan")) for pid, task in tasks}
        self.thaw()
        late = []
        for pid, task in tasks:
            state, wchan = seen[task]
            if state in "ZX" or wchan in PARKED:
                continue
            if self.version == "v1" and state == "D" and proctree.state(pid, task) != "D":
                continue
            where = "runs in the kernel" if wchan == "0" else f"waits in {wchan}"
            late.append(f"process {task} ({proctree.read(pid, task, 'comm')}, {where})")
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        return ", ".join(late[:3]) + more if late else f"cgroup {self.path}"

    def _each(self, name: str) -> Iterator[str]:
        yield self._read(name)
        for folder, children, _ in os.walk(self.path):
            for child in children:
                try:
                    with open(f"{folder}/{child}/{name}") as file:
                        yield file.read()
                except OSError as gone:
                    if gone.errno not in (errno.ENOENT, errno.ENODEV):
                        raise

    def _read(self, name: str) -> str:
        try:
            with open(name, opener=lambda path, flags: os.open(path, flags, dir_fd=self.fd)) as file:
                return file.read()
        except OSError as gone:
            raise self._gone(gone) from gone

    def _write(self, name: str, text: str) -> None:
        try:
            with open(name, "w", opener=lambda path, flags: os.open(path, os.O_WRONLY, dir_fd=self.fd)) as file:
                file.write(text)
        except OSError as gone:
            raise self._gone(gone) from gone

    def _gone(self, error: OSError | None = None) -> CheckpointFailed:
        if error is not None and error.errno not in (errno.ENOENT, errno.ENODEV):
            return CheckpointFailed(f"cgroup {self.path}: {error.strerror}")
        return GroupGone(f"cgroup {self.path} is gone: its container was deleted, or nothing was frozen in it")


def _own(group: str, container_id: str) -> bool:
    """Whether a group is one container's alone: runtimes name it by the id."""
    return group != "/" and container_id in group


def _version_set() -> Version | None:
    """The version that the environment's STASIS_FREEZER asks for."""
    value = os.environ.get("STASIS_FREEZER", "")
    if value in ("v1", "v2"):
        return value  # type: ignore[return-value]
    if value:
        raise UsageError(f"STASIS_FREEZER={value} is neither v1 nor v2")
    return None


def _rmdir(folder: str, end: float) -> None:
    while True:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            pass
        except OSError as busy:  # an exiting task leaves its group a moment after it left the list
            if busy.errno != errno.EBUSY or now() > end:
                raise CheckpointFailed(f"cgroup {folder} cannot be removed: {busy.strerror}") from None
            time.sleep(0.001)
            continue
        return
