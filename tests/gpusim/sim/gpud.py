"""The GPUs of a machine that has none: their memory, what /proc/driver/nvidia says of them, their faults.

Memory is files of a tmpfs that is mounted nowhere, handed out as descriptors: a process that maps one cannot be dumped,
as one that maps a device cannot. It is charged here, not to who maps it, and freed with its last mapping.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import os
import socket
import stat
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUEST = struct.Struct("<IIQQ16s")
REPLY = struct.Struct("<iiQQQQIIiiiii4x")
GPU = struct.Struct("<16s16sQ")
MAX_GPUS = 8
HELLO, ALLOC, FAULT, EXPORT, IMPORT = range(1, 6)
GRAIN = 2 << 20
DAMAGE = ("", "dead", "content", "one", "swap")
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 430, 431, 432
NO_FAULT = (-1, 0, 0, 0, 0)


def syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def detached_tmpfs(size: int) -> int:
    context = syscall(SYS_FSOPEN, b"tmpfs", 1)
    syscall(SYS_FSCONFIG, context, 1, b"size", str(size).encode(), 0)
    syscall(SYS_FSCONFIG, context, 6, None, None, 0)
    mount = syscall(SYS_FSMOUNT, context, 1, 0)
    os.close(context)
    return mount


@dataclass
class Gpu:
    index: int
    uuid: str  # 32 hex digits
    chip: str
    total: int
    root: int = field(init=False)

    def __post_init__(self) -> None:
        self.root = detached_tmpfs(self.total + (1 << 20))
        os.mkdir("dev", dir_fd=self.root)

    def file(self, name: str, size: int) -> int:
        """An unlinked file; OSError where the memory is full."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(f"dev/{name}", flags, 0o600, dir_fd=self.root)
        os.unlink(f"dev/{name}", dir_fd=self.root)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            raise
        return fd

    def describe(self, proc: Path) -> None:
        folder = proc / "gpus" / f"0000:{self.index + 1:02x}:00.0"
        folder.mkdir(parents=True)
        u = self.uuid
        name = f"GPU-{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}"
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA {self.chip}\nGPU UUID: \t {name}\nBus Type: \t PCIe\nDevice Minor: \t {self.index}\n"
        )


class Gpud:
    def __init__(self, folder: Path, gpus: list[Gpu], bandwidth: tuple[int, int], driver: str) -> None:
        self.folder = folder
        self.gpus = gpus
        self.bandwidth = bandwidth
        self.driver = int(driver.split(".")[0])
        self.turns = gpus[0].file("nvidiactl", 4096)
        self.exported: dict[int, tuple[int, int, int]] = {}  # handle -> descriptor, size, pid
        self.next_handle = 1
        self.faults: list[dict[str, Any]] = []
        self.faults_read = 0
        self.mutex = threading.Lock()
        proc = folder / "proc"
        proc.mkdir()
        (proc / "version").write_text(
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Mon Jun  1 00:00:00 UTC 2026\n"
        )
        for gpu in gpus:
            gpu.describe(proc)

    def serve(self, server: socket.socket) -> None:
        while True:
            client, _ = server.accept()
            with client, self.mutex:
                pid = struct.unpack("iii", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                data = client.recv(REQUEST.size)
                if len(data) == REQUEST.size:
                    self.answer(client, pid, data)

    def answer(self, client: socket.socket, pid: int, data: bytes) -> None:
        kind, gpu, size, handle, action = REQUEST.unpack(data)
        reply: dict[str, Any] = {}
        fd = None
        if kind == HELLO:
            fd = os.dup(self.turns)
        elif kind == ALLOC:
            self.forget_dead()
            try:
                fd = self.gpus[gpu].file(f"nvidia{gpu}", -(-size // GRAIN) * GRAIN)
                reply = {"handle": self.next_handle}
                self.exported[self.next_handle] = (os.open(f"/proc/self/fd/{fd}", os.O_RDWR), size, pid)
                self.next_handle += 1
            except OSError:
                reply = {"error": 2}
        elif kind == FAULT:
            reply = self.fault(action.rstrip(b"\0").decode(), pid)
        elif handle not in self.exported:
            reply = {"error": 1}
        elif kind == IMPORT:
            fd, reply = os.dup(self.exported[handle][0]), {"size": self.exported[handle][1]}
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        try:
            client.sendmsg([self.reply(**reply)], files)
        except OSError:
            pass  # it is gone
        if fd is not None:
            os.close(fd)

    def reply(
        self, error: int = 0, handle: int = 0, size: int = 0, fault: tuple[int, int, int, int, int] = NO_FAULT
    ) -> bytes:
        head = REPLY.pack(error, len(self.gpus), handle, size, *self.bandwidth, self.driver, 0, *fault)
        table = b"".join(GPU.pack(bytes.fromhex(g.uuid), g.chip.encode(), g.total) for g in self.gpus)
        return head + table.ljust(MAX_GPUS * GPU.size, b"\0")

    def forget_dead(self) -> None:
        """Descriptors kept for export are let go when what they are mapped by is gone: a mapping alone counts."""
        for handle, (fd, _, pid) in list(self.exported.items()):
            if not mapped(pid, os.fstat(fd).st_ino):
                os.close(fd)
                del self.exported[handle]

    def fault(self, action: str, pid: int) -> dict[str, Any]:
        """By the first rule of faults.json that fits: {"op", "pid", "times", "error", "state", "hang", "delay_ms",
        "damage", "idle"}."""
        rules = self.folder / "faults.json"
        changed = rules.stat().st_mtime_ns if rules.exists() else 0
        if changed != self.faults_read:
            self.faults_read = changed
            self.faults = json.loads(rules.read_text()) if changed else []
        for rule in self.faults:
            if rule["op"] == action and rule.get("pid", pid) == pid and rule.get("times", 1):
                rule["times"] = rule.get("times", -1) - 1
                what = (
                    rule.get("state", -1),
                    int(rule.get("hang", False)),
                    rule.get("delay_ms", 0),
                    DAMAGE.index(rule.get("damage", "")),
                    int(rule.get("idle", False)),
                )
                return {"error": rule.get("error", 0), "fault": what}
        return {}


def mapped(pid: int, inode: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as lines:
            return any(line.split()[4] == str(inode) and "/dev/nvidia" in line for line in lines)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gpu", action="append", required=True, help="UUID:CHIP:MIB")
    parser.add_argument("--bandwidth", default="0:0", help="MB/s from and to each device; 0: no limit")
    parser.add_argument("--driver", default="580.65.06")
    parser.add_argument("--node", default="10:229", help="numbers of the device nodes")
    options = parser.parse_args()
    gpus = []
    for index, text in enumerate(options.gpu):
        uuid, chip, mib = text.split(":")
        gpus.append(Gpu(index, uuid, chip, int(mib) << 20))
    (options.dir / "dev").mkdir(parents=True)
    major, minor = map(int, options.node.split(":"))
    for name in ["nvidiactl", *(f"nvidia{gpu.index}" for gpu in gpus)]:
        os.mknod(options.dir / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(options.dir / "dev" / name, 0o666)
    down, up = (int(float(part) * 1e6) for part in options.bandwidth.split(":"))
    gpud = Gpud(options.dir, gpus, (down, up), options.driver)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(options.dir / "socket"))
    os.chmod(options.dir / "socket", 0o666)
    server.listen(64)
    print("ready", flush=True)
    gpud.serve(server)


if __name__ == "__main__":
    main()
