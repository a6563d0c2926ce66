"""What init denies by seccomp, so that the trainer never opens what CRIU cannot dump."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

import pytest

from .conftest import Init

pytestmark = pytest.mark.root
Start = Callable[..., Init]

UNPRIVILEGED = "setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set -all --inh-caps -all"
# Number of the error that each call answers, called without any valid argument; and by int 0x80, from 64-bit code.
CHECK = """
import ctypes, json, mmap
libc = ctypes.CDLL(None, use_errno=True)
def call(nr):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(nr), ctypes.c_long(-1), None, ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(0))
    return ctypes.get_errno()
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("53 bb ffffffff 31c9 b8 a9010000 cd80 5b c3".replace(" ", "")))  # io_uring_setup(-1, 0)
int80 = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
seen = {"setup": call(425), "enter": call(426), "register": call(427), "userfaultfd": call(323), "perf": call(298),
        "bpf": call(321), "int80": -int80()}
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps(seen | {key: int(status[key]) for key in ("NoNewPrivs", "Seccomp_filters")}))
"""


def check(start: Start, *command: str, **more: object) -> dict[str, int]:
    run = start("run", *command, "python3", "-c", CHECK, **more)
    assert run.wait() == 0
    seen: dict[str, int] = json.loads(run.out.read_text())
    return seen


@pytest.mark.parametrize("wrap", ["", UNPRIVILEGED], ids=["CAP_SYS_ADMIN", "unprivileged"])
def test_io_uring_is_denied_from_the_start(start: Start, wrap: str) -> None:
    seen = check(start, wrap=wrap)
    assert [seen[name] for name in ("setup", "enter", "register", "int80")] == [errno.ENOSYS] * 4
    assert errno.ENOSYS not in (seen["userfaultfd"], seen["perf"], seen["bpf"])
    assert seen["NoNewPrivs"] == bool(wrap)  # it breaks setuid programs: only where there is no other way


def test_the_rest_is_denied_where_asked(start: Start) -> None:
    seen = check(start, options=["--deny", "userfaultfd,perf,bpf"])
    assert [seen[name] for name in ("userfaultfd", "perf", "bpf")] == [errno.ENOSYS] * 3
    assert errno.ENOSYS not in (seen["setup"], seen["int80"])
    assert check(start, options=["--deny", "io_uring,bpf"])["setup"] == errno.ENOSYS


def test_nothing_is_denied_where_asked(start: Start) -> None:
    assert check(start, options=["--deny", "none"])["Seccomp_filters"] == 0


def test_what_the_containers_profile_denies_gets_no_second_filter(start: Start, init_binary: object) -> None:
    inner = ["unshare", "--fork", "--pid", "--mount-proc", str(init_binary), "run", "--volume", "/nowhere", "--"]
    seen = check(start, *inner)
    assert seen["setup"] == errno.ENOSYS
    assert seen["Seccomp_filters"] == 1
