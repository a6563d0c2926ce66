"""A container on one machine, as kubelet and runc would make it: the user's command under our init, or a placeholder.

Overlay root file system, /dev/shm, emptyDirs, volumes, a network namespace that is there already, stdout and stderr
as pipes into a log file. The agent finds it by its id alone, as it finds a pod's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stasis.agent import lookup
from stasis.agent.freezer import Freezer
from stasis.errors import UsageError

VOLUME = "/stasis"  # where our volume is mounted: init, its word
# containerd's default set
DEFAULT_CAPABILITIES = (
    "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE "
    "SYS_CHROOT KILL AUDIT_WRITE"
).split()
ALL_CAPABILITIES = (
    *DEFAULT_CAPABILITIES,
    *"SYS_ADMIN BPF PERFMON SYS_PTRACE NET_ADMIN IPC_LOCK SYS_NICE DAC_READ_SEARCH".split(),
)
SECCOMP_DENIED = (
    "io_uring_setup io_uring_enter io_uring_register userfaultfd bpf perf_event_open keyctl add_key mount ptrace"
).split()


@dataclass(frozen=True)
class ContainerSpec:
    """What a pod's container says. A checkpoint carries `emptydirs`, not `volumes` and `readonly` (host folder by mount
    point). `devices`: numbers of character devices by path, as a device plugin gives them."""

    rootfs: Path
    command: Sequence[str]
    init: Path
    netns: Path
    hostname: str
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    uid: int = 0
    capabilities: Sequence[str] = tuple(DEFAULT_CAPABILITIES)
    seccomp: bool = False
    shm_size: str = "512m"
    memlock: int | None = None
    cgroup_writable: bool = False
    emptydirs: Sequence[str] = ()
    volumes: Mapping[str, Path] = field(default_factory=dict)
    readonly: Mapping[str, Path] = field(default_factory=dict)
    devices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hosts: Path | None = None
    deny: str = "io_uring"


class Container:
    """One container; `placeholder` waits for a restore. Use as a context manager, or call `delete`.

    `unfinished`: what has come of a line of stdout and of stderr whose end has not. A program can be suspended between
    two writes of one line, so the next container's begins with it.
    """

    def __init__(
        self,
        spec: ContainerSpec,
        identity: str,
        folder: Path,
        *,
        placeholder: bool = False,
        on_line: Callable[[str], None] | None = None,
        unfinished: Sequence[bytes] = (b"", b""),
    ) -> None:
        self.spec = spec
        self.id = identity
        self.folder = folder
        self.placeholder = placeholder
        self.log = folder / "log"
        self.pid1 = 0
        self.unfinished = list(unfinished)
        self._on_line = on_line
        self._pumps: list[threading.Thread] = []
        self._status: int | None = None
        self._runc: subprocess.Popen[bytes] | None = None

    def emptydir(self, mount_point: str) -> Path:
        """The host folder of an emptyDir."""
        return self.folder / "emptydir" / mount_point.strip("/").replace("/", "-")

    def start(self) -> Container:
        folder = self.folder
        self._remove()  # what a killed run left under this name
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("upper", "work", "rootfs", "shm", "volume"):
            (folder / name).mkdir(parents=True)
        for mount_point in self.spec.emptydirs:
            self.emptydir(mount_point).mkdir(parents=True)
            self.emptydir(mount_point).chmod(0o777)
        (folder / "volume" / self.spec.init.parent.name).mkdir()
        shutil.copy2(self.spec.init, folder / "volume" / self.spec.init.parent.name / "init")
        overlay = f"lowerdir={self.spec.rootfs},upperdir={folder}/upper,workdir={folder}/work"
        _mount("overlay", "overlay", folder / "rootfs", overlay)
        _mount("tmpfs", "shm", folder / "shm", f"size={self.spec.shm_size},mode=1777")
        (folder / "config.json").write_text(json.dumps(self._config(), indent=1))
        self._run()
        return self

    def _run(self) -> None:
        """`runc run` in the foreground: its exit status is the container's."""
        ends = [os.pipe(), os.pipe()]
        pid_file = self.folder / "pid"
        self._runc = subprocess.Popen(
            ["runc", "run", "--pid-file", str(pid_file), "-b", str(self.folder), self.id],
            stdin=subprocess.DEVNULL,
            stdout=ends[0][1],
            stderr=ends[1][1],
            start_new_session=True,
        )
        lock = threading.Lock()
        for stream, (read, write) in enumerate(ends):
            os.close(write)
            pump = threading.Thread(target=self._pump, args=(stream, read, lock), name=f"log:{self.id}", daemon=True)
            self._pumps.append(pump)
            pump.start()
        while not pid_file.exists() or not pid_file.read_text():
            if self._runc.poll() is not None:
                self._join()
                raise UsageError(f"the container {self.id} does not start: {self.log.read_text()[-2000:]}")
            threading.Event().wait(0.005)
        self.pid1 = int(pid_file.read_text())

    def _pump(self, stream: int, read: int, lock: threading.Lock) -> None:
        with os.fdopen(read, "rb", buffering=0) as source, open(self.log, "ab", buffering=0) as log:
            while data := source.read(65536):
                log.write(data)
                *lines, self.unfinished[stream] = (self.unfinished[stream] + data).split(b"\n")
                if self._on_line:
                    with lock:
                        for line in lines:
                            self._on_line(line.decode(errors="replace"))

    def lines(self) -> list[str]:
        """The log so far."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def status(self) -> int | None:
        """The exit status of the container, None while it runs."""
        if self._status is None and self._runc is not None and (code := self._runc.poll()) is not None:
            self._status = code if code >= 0 else 128 - code
            self._join()
        return self._status

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; None where the time is over first."""
        assert self._runc is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._runc.wait(timeout)
        return self.status()

    def kill(self, signal_name: str = "TERM") -> None:
        subprocess.run(["runc", "kill", self.id, signal_name], capture_output=True)

    def _join(self) -> None:
        for pump in self._pumps:
            pump.join(10)

    def delete(self) -> None:
        """Remove the container and its mounts; its folder stays for those who read the log."""
        self._remove()
        if self._runc is not None:
            try:
                self._runc.wait(10)
            except subprocess.TimeoutExpired:
                self._runc.kill()
                self._runc.wait()
            self.status()

    def _remove(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            _thaw(lookup.find_pid1(self.id))
        subprocess.run(["runc", "delete", "-f", self.id], capture_output=True)
        for name in ("rootfs", "shm"):
            if os.path.ismount(self.folder / name):
                subprocess.run(["umount", "-l", str(self.folder / name)], capture_output=True)

    def __enter__(self) -> Container:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.delete()

    def _config(self) -> dict[str, Any]:
        spec = self.spec
        verb = "wait" if self.placeholder else "run"
        init = f"{VOLUME}/{spec.init.parent.name}/init"
        args = [init, verb, "--volume", VOLUME, "--deny", spec.deny, "--", *spec.command]
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOSTNAME": spec.hostname,
            **spec.env,
        }
        capabilities = [f"CAP_{name}" for name in spec.capabilities]
        limits = [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 1024}]
        if spec.memlock is not None:
            limits.append({"type": "RLIMIT_MEMLOCK", "hard": spec.memlock, "soft": spec.memlock})
        namespaces = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
        namespaces.append({"type": "network", "path": str(spec.netns)})
        if spec.cgroup_writable:
            namespaces.append({"type": "cgroup"})
        devices = [
            {"path": path, "type": "c", "major": major, "minor": minor} for path, (major, minor) in spec.devices.items()
        ]
        allowed = [{**device, "allow": True, "access": "rwm"} for device in devices]
        linux: dict[str, Any] = {
            "devices": [{**device, "fileMode": 0o666} for device in devices],
            "resources": {"devices": [{"allow": False, "access": "rwm"}, *allowed]},
            "cgroupsPath": f"/stasis/{self.id}",
            "namespaces": namespaces,
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        }
        if spec.seccomp:
            linux["seccomp"] = {
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": ["SCMP_ARCH_X86_64"],
                "syscalls": [{"names": SECCOMP_DENIED, "action": "SCMP_ACT_ERRNO"}],
            }
        return {
            "ociVersion": "1.0.2",
            "hostname": spec.hostname,
            "process": {
                "terminal": False,
                "user": {"uid": spec.uid, "gid": spec.uid},
                "args": args,
                "cwd": spec.cwd,
                "env": [f"{name}={value}" for name, value in env.items()],
                "capabilities": {
                    **dict.fromkeys(("bounding", "effective", "permitted", "inheritable"), capabilities),
                    "ambient": [],
                },
                "rlimits": limits,
                "noNewPrivileges": not capabilities,
            },
            "root": {"path": "rootfs", "readonly": False},
            "mounts": self._mounts(),
            "linux": linux,
        }

    def _mounts(self) -> list[dict[str, Any]]:
        def mount(destination: str, kind: str, source: object, *options: str) -> dict[str, Any]:
            return {"destination": destination, "type": kind, "source": str(source), "options": list(options)}

        cgroup = "rw" if self.spec.cgroup_writable else "ro"
        mounts = [
            mount("/proc", "proc", "proc"),
            mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755", "size=65536k"),
            mount(
                "/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"
            ),
            mount("/dev/shm", "bind", self.folder / "shm", "rbind", "rw"),
            mount("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev"),
            mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            mount("/sys/fs/cgroup", "cgroup", "cgroup", "nosuid", "noexec", "nodev", "relatime", cgroup),
            mount(VOLUME, "bind", self.folder / "volume", "rbind", "rw"),
        ]
        mounts += [mount(point, "bind", self.emptydir(point), "rbind", "rw") for point in self.spec.emptydirs]
        mounts += [mount(point, "bind", host, "rbind", "rw") for point, host in self.spec.volumes.items()]
        mounts += [mount(point, "bind", host, "rbind", "ro") for point, host in self.spec.readonly.items()]
        if self.spec.hosts is not None:
            mounts.append(mount("/etc/hosts", "bind", self.spec.hosts, "rbind", "ro"))
        return mounts


def _mount(kind: str, source: str, target: Path, options: str) -> None:
    subprocess.run(["mount", "-t", kind, source, str(target), "-o", options], check=True, capture_output=True)


def _thaw(pid1: int) -> None:
    """A container with a frozen group inside cannot be deleted."""
    with contextlib.suppress(Exception):
        Freezer.of(pid1).thaw()
