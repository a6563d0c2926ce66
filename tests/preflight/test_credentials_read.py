"""Credentials of real images and of real processes are read as the kernel has them."""

from __future__ import annotations

import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.preflight.conftest import TOOLS, Pod

from stasis.agent import proctree
from stasis.agent.admission import require_restored_rights
from stasis.agent.credentials import of_images, of_process
from stasis.agent.criu_images import ImageCodec
from stasis.agent.lookup import inner_pids
from stasis.core.credentials import exceeding
from stasis.errors import Corrupt, Refused

pytestmark = [pytest.mark.root, pytest.mark.criu]

SYS_ADMIN = 1 << 21
DENY_GETITIMER = struct.pack("<HBBI", 0x20, 0, 0, 0) + struct.pack("<HBBI", 0x15, 0, 1, 36)
DENY_GETITIMER += struct.pack("<HBBI", 6, 0, 0, 0x50001) + struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)
ALLOW = struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)
FILTERED = f"""
call(libc.prctl(38, 1, 0, 0, 0))
for program in ({DENY_GETITIMER!r}, {ALLOW!r}):
    kept = ctypes.create_string_buffer(program)
    call(libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(kept)), 0, 0))
"""
# A thread with groups of its own, without CAP_SYS_ADMIN in its bounding set, then under a filter
PROGRAM = f"""
def run():
    call(libc.syscall(116, 2, (ctypes.c_int * 2)(27, 28)))
    call(libc.prctl(24, 21, 0, 0, 0))
    {FILTERED.replace(chr(10), chr(10) + "    ")}
    go.set()
    signal.pause()
go = threading.Event()
threading.Thread(target=run, daemon=True).start()
go.wait()
zombie = os.fork() or os._exit(0)
ready()
"""


@pytest.fixture(scope="session")
def bundle() -> Path:
    return Path(subprocess.run([TOOLS / "criu.sh"], check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture
def images(pod: Callable[[str], Pod], bundle: Path, tmp_path: Path) -> tuple[Pod, dict[str, bytes]]:
    container, folder = pod(PROGRAM), tmp_path / "images"
    folder.mkdir()
    criu = [f"{bundle}/ld-linux-x86-64.so.2", "--library-path", str(bundle), f"{bundle}/criu"]
    subprocess.run(
        [
            *("nsenter", "-t", str(container.pid1), "-m", "-n", "-i", "-u", "-p", *criu, "dump", "--no-default-config"),
            *("-t", str(inner_pids(container.root.pid)[-1]), "-D", str(folder), "--lib", f"{bundle}/lib"),
            *("--leave-running", "--network-lock", "skip", "--manage-cgroups=ignore", "-o", "log", "-v3"),
        ],
        check=True,
        env={},
    )
    return container, {path.name: path.read_bytes() for path in folder.glob("*.img")}


def test_images_of_a_dump(images: tuple[Pod, dict[str, bytes]], bundle: Path) -> None:
    container, files = images
    found = of_images(ImageCodec(bundle / "images.desc"), files)

    assert [one.comm for one in found] == ["stasis-keeper", "python", "python"]  # the zombie runs nothing any more
    init = of_process(container.pid1)
    keeper, leader, thread = sorted(found, key=lambda one: one.thread)
    for one in (keeper, leader):
        assert (one.uids, one.gids, one.permitted, one.bounding) == (
            init.uids,
            init.gids,
            init.permitted,
            init.bounding,
        )
        assert (one.seccomp, one.filters, one.no_new_privs) == (0, (), False)
    assert thread.groups == (27, 28)
    assert thread.bounding == leader.bounding & ~SYS_ADMIN
    assert (thread.seccomp, thread.filters, thread.no_new_privs) == (2, (DENY_GETITIMER, ALLOW), True)
    assert exceeding(found, init) == []


def test_of_a_container_with_less_every_task_is_refused(images: tuple[Pod, dict[str, bytes]], bundle: Path) -> None:
    """In a real placeholder that is another user, with fewer capabilities, under a profile."""
    _, files = images
    with subprocess.Popen(
        [
            *("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--bounding-set=-sys_admin"),
            *("--no-new-privs", "sleep", "1000"),
        ]
    ) as other:
        try:
            while (placeholder := of_process(other.pid)).comm != "sleep":
                pass
        finally:
            other.kill()
    findings = exceeding(of_images(ImageCodec(bundle / "images.desc"), files), placeholder)
    wheres = {finding.where for finding in findings if finding.comm == "stasis-keeper"}
    assert wheres >= {"user 0", "group 0", "permitted capabilities", "bounding capabilities", "no_new_privs"}
    assert {finding.comm for finding in findings} == {"stasis-keeper", "python"}


@pytest.mark.parametrize("missing", ["pstree.img", "core", "creds"])
def test_an_image_without_credentials_is_refused(
    missing: str, images: tuple[Pod, dict[str, bytes]], bundle: Path
) -> None:
    """CRIU would go on without, or read them elsewhere."""
    codec, (_, files) = ImageCodec(bundle / "images.desc"), images
    leader = codec.load("pstree.img", files["pstree.img"]).messages[0].pid
    name = "pstree.img" if missing == "pstree.img" else f"core-{leader}.img"
    if missing == "creds":
        image = codec.load(name, files[name])
        image.messages[0].thread_core.ClearField("creds")
        files[name] = codec.dump(image)
    else:
        del files[name]
    with pytest.raises(Corrupt, match=name):
        of_images(codec, files)


@pytest.fixture
def filtered(pod: Callable[[str], Pod]) -> Pod:
    return pod(FILTERED + "\nready()\nos._exit(0)")


def test_filters_of_a_process_are_read_and_it_goes_on(filtered: Pod) -> None:
    found = of_process(filtered.trainer)
    assert (found.seccomp, found.filters, found.no_new_privs) == (2, (DENY_GETITIMER, ALLOW), True)
    assert filtered.finish() == 0


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        of_process(process.pid)


def test_restored_processes_are_compared_as_the_kernel_has_them(pod: Callable[[str], Pod]) -> None:
    container = pod(PROGRAM)
    pids = [pid for pid in proctree.walk(container.root.pid) if not proctree.dead(pid)]
    require_restored_rights(container.pid1, pids)
    command = ["setpriv", "--bounding-set", "-sys_admin", "sleep", "600"]
    with subprocess.Popen(command) as less:
        try:
            assert until(lambda: proctree.read(less.pid, less.pid, "comm") == "sleep")
            require_restored_rights(less.pid, [less.pid])
            with pytest.raises(Refused, match="the new container may not have CAP_SYS_ADMIN"):
                require_restored_rights(less.pid, pids)
        finally:
            less.kill()


def until(condition: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False
