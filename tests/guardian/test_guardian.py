"""A tree that its agent leaves frozen runs on: at once before the vote, by the recorded decision after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.guardian.bench import SOURCE, Bench, kill_guardian
from tests.guardian.conftest import Container, try_rmdir, wait
from tests.guardian.dump import dump

from stasis.agent import cgroups
from stasis.agent.journal import Fate, FrozenTree, StateDir
from stasis.agent.network import lock
from stasis.agent.network.sockets import TcpSockets
from stasis.core.records import Verdict

pytestmark = pytest.mark.root
TCP_REPAIR = 19

both_versions = pytest.mark.parametrize("bench", ["v1", "v2"], indirect=True)


@both_versions
def test_orderly_freeze(bench: Bench) -> None:
    agent = bench.agent("arm", "freeze", "lock", "check")
    assert bench.frozen()
    assert len(bench.guardians()) == 1
    assert bench.tell(agent, "ensure") == "False"
    assert bench.tell(agent, "thaw") == "done"
    assert bench.tell(agent, "stop") == "done"
    assert bench.guardians() == []
    assert bench.box.runs()
    assert os.listdir(bench.path / "state") == []
    assert bench.tell(agent, "stop") == "done"


@both_versions
def test_released_tree_is_the_agents_to_kill(bench: Bench) -> None:
    agent = bench.agent("arm", "freeze", "vote", "vote")
    bench.decide(Verdict.COMMIT)
    bench.decide(Verdict.RELEASE)
    assert bench.box.still()
    time.sleep(0.6)
    assert bench.frozen()
    assert bench.tell(agent, "kill") == "done"
    assert wait(lambda: bench.guardians() == [])
    assert "the tree is gone" in bench.log()
    assert bench.tell(agent, "stop") == "done"


@both_versions
@pytest.mark.parametrize("words", [("arm",), ("arm", "freeze"), ("arm", "freeze", "lock")])
def test_agent_killed_before_its_vote(bench: Bench, words: tuple[str, ...]) -> None:
    bench.kill(bench.agent(*words))
    assert wait(lambda: bench.state.fate("8a5e.0") is Fate.FIRED)
    assert wait(bench.free)
    assert bench.box.runs()
    assert bench.state.claim("8a5e.0", Fate.VOTED) is Fate.FIRED


@both_versions
@pytest.mark.parametrize("verdict", [Verdict.ABORT, Verdict.CONTINUE])
def test_agent_killed_after_its_vote(bench: Bench, verdict: Verdict) -> None:
    bench.kill(bench.agent("arm", "freeze", "lock", "vote", seconds=3.0))
    time.sleep(0.6)
    assert bench.frozen()
    if verdict is Verdict.CONTINUE:
        bench.decide(Verdict.COMMIT)
        time.sleep(0.6)
        assert bench.frozen()
    bench.decide(verdict)
    assert wait(lambda: bench.guardians() == [])
    assert bench.free()
    assert bench.box.runs()
    assert bench.state.fate("8a5e.0") is Fate.VOTED


def test_guardian_of_a_killed_agent_ends(bench: Bench) -> None:
    bench.kill(bench.agent("arm", "freeze", "lock"))
    assert wait(lambda: bench.guardians() == [])
    assert bench.free()
    assert "the freeze is over" in bench.log()


def test_vote_outlasts_the_deadline(bench: Bench) -> None:
    bench.agent("arm", "freeze", "vote", seconds=2.0)
    assert wait(lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) > deadline(bench))
    time.sleep(0.6)
    assert bench.frozen()


@both_versions
def test_silent_agent_loses_at_its_deadline(bench: Bench) -> None:
    agent = bench.agent("arm", "freeze", "lock", seconds=2.0)
    agent.send_signal(signal.SIGSTOP)
    assert bench.frozen()
    assert wait(bench.free)
    assert time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= deadline(bench)
    assert bench.box.runs()
    agent.send_signal(signal.SIGCONT)
    # Unaware of all that it freezes once more: the guardian has stayed for this.
    bench.tell(agent, "freeze")
    assert wait(bench.free)
    assert "DeadlineExceeded" in bench.tell(agent, "vote")
    assert "CheckpointFailed" in bench.tell(agent, "check")
    assert bench.tell(agent, "stop") == "done"
    assert bench.guardians() == []


def test_vote_after_the_deadline_is_refused_without_a_guardian(bench: Bench) -> None:
    agent = bench.agent("arm", "freeze", seconds=2.0)
    kill_guardian(bench)
    assert wait(lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= deadline(bench))
    assert "DeadlineExceeded" in bench.tell(agent, "vote")
    assert bench.tell(agent, "ensure") == "True"
    assert wait(bench.free)


def test_deadline_is_of_boottime(bench: Bench, tmp_path: Path) -> None:
    """The guardian's CLOCK_MONOTONIC is a thousand seconds ahead of its CLOCK_BOOTTIME, the wall clock years."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec unshare --time --monotonic 1000 --fork {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.executable = {str(python)!r}")
    bench.agent("arm", seconds=700.0, path=f"{tmp_path}:{SOURCE}")
    (pid,) = bench.guardians()
    offsets = Path(f"/proc/{pid}/timens_offsets").read_text().splitlines()
    assert ["monotonic", "1000", "0"] in [line.split() for line in offsets]
    time.sleep(0.6)
    assert bench.state.fate("8a5e.0") is None


def test_standing_by_it_is_told_the_deadline_of_the_freeze(bench: Bench) -> None:
    """By word of mouth: nothing is started or written between the preparation and the freeze."""
    agent = bench.agent("arm", seconds=3.0)
    before = bench.guardians()
    assert bench.tell(agent, "rearm") == "False"
    assert bench.tell(agent, "freeze") == "done"
    assert bench.guardians() == before
    assert wait(lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) > deadline(bench))  # of the preparation
    time.sleep(0.6)
    assert bench.frozen()
    assert bench.tell(agent, "hurry") == "done"
    agent.send_signal(signal.SIGSTOP)
    assert wait(bench.free)
    assert bench.state.fate("8a5e.0") is Fate.FIRED


def test_standing_by_too_long_it_owns_no_freeze(bench: Bench) -> None:
    agent = bench.agent("arm", seconds=0.5)
    assert wait(lambda: bench.state.fate("8a5e.0") is Fate.FIRED)
    assert "too late" in bench.tell(agent, "rearm")
    assert bench.box.runs()
    bench.kill(agent)
    assert wait(lambda: bench.guardians() == [])


@pytest.mark.parametrize("bench", ["v2"], indirect=True)
def test_killed_while_it_is_told_its_deadline_it_is_replaced(bench: Bench) -> None:
    agent = bench.agent("arm", seconds=5.0)
    (guardian,) = bench.guardians()
    os.kill(guardian, signal.SIGSTOP)
    assert agent.stdin is not None
    agent.stdin.write("rearm\n")
    agent.stdin.flush()
    time.sleep(0.1)
    os.kill(guardian, signal.SIGKILL)
    assert bench.answer(agent) == "True"
    assert guardian not in bench.guardians()
    bench.kill(agent)


def test_killed_while_it_stands_by_it_is_replaced(bench: Bench) -> None:
    agent = bench.agent("arm", seconds=2.0)
    kill_guardian(bench)
    assert bench.tell(agent, "rearm") == "True"
    assert bench.tell(agent, "freeze") == "done"
    assert wait(lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) > deadline(bench))
    time.sleep(0.6)
    assert bench.frozen()
    bench.kill(agent)
    assert wait(bench.free)


def test_guardian_killed_is_noticed_and_replaced(bench: Bench) -> None:
    agent = bench.agent("arm", "freeze", "lock")
    first = kill_guardian(bench)
    assert bench.frozen()
    assert bench.tell(agent, "ensure") == "True"
    assert bench.guardians() not in ([], [first])
    bench.kill(agent)
    assert wait(bench.free)


def test_only_a_kill_ends_a_guardian(bench: Bench) -> None:
    bench.agent("arm", "freeze")
    (pid,) = bench.guardians()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
        os.kill(pid, number)
    time.sleep(0.3)
    assert bench.guardians() == [pid]
    assert bench.frozen()
    assert not Path(f"/proc/{pid}/fd/0").readlink().name.startswith("pipe")
    assert os.getsid(pid) != os.getsid(0)
    assert Path(f"/proc/{pid}/comm").read_text() == "stasis-guardian\n"


def test_end_of_the_agents_cgroup_spares_the_guardian(bench: Bench) -> None:
    group = bench.box.groups["v2"] / "agent"
    group.mkdir()
    join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    agent = bench.agent("arm", "freeze", "lock", prefix=("sh", "-c", join, "sh"))
    (guardian,) = bench.guardians()
    assert cgroups.membership(agent.pid)[""] == f"/{bench.box.id}/agent"
    assert cgroups.membership(guardian)[""] == "/stasis-guardian"
    (group / "cgroup.kill").write_text("1")
    agent.wait()
    assert wait(bench.free)
    assert bench.guardians() == [guardian]
    assert bench.box.runs()


def test_no_group_of_the_agents_is_kept_by_its_guardian(bench: Bench) -> None:
    """Else the agent's container could not end while its guardian lives."""
    group = Path("/sys/fs/cgroup/memory", bench.box.id)
    group.mkdir()
    try:
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        agent = bench.agent("arm", "freeze", "lock", "vote", prefix=("sh", "-c", join, "sh"))
        assert cgroups.membership(agent.pid)["memory"] == f"/{bench.box.id}"
        bench.kill(agent)
    finally:
        assert wait(lambda: try_rmdir(group))
    assert bench.frozen()


def test_container_deleted_while_frozen(bench: Bench) -> None:
    bench.agent("arm", "freeze", "lock", "vote")
    bench.box.remove()
    assert wait(lambda: bench.guardians() == [])
    assert not lock.is_locked(bench.netns)


def test_full_disk_keeps_nothing_frozen(bench: Bench) -> None:
    state = bench.path / "state"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", state], check=True)
    try:
        bench.state.close()
        bench.state = StateDir(state)
        agent = bench.agent("arm", "freeze", "lock")
        with open(state / "fill", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        assert "ResourceShort" in bench.tell(agent, "vote")
        bench.kill(agent)
        assert wait(bench.free)
        assert bench.state.fate("8a5e.0") is Fate.FIRED
    finally:
        subprocess.run(["umount", "--lazy", state], check=True)


def test_traced_tree_in_repair_mode_is_set_free(bench: Bench) -> None:
    """As a CRIU leaves it that was stuck or killed in the middle of a dump."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    tracer = holder = None
    try:
        holder = subprocess.Popen(["sleep", "600"], pass_fds=(client.fileno(),))
        client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        agent = bench.agent("arm", "freeze")
        cgroups.move(holder.pid, bench.freezer.path)
        tracer = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import ctypes, time, sys\n"
                f"assert ctypes.CDLL(None).ptrace(0x4206, {holder.pid}, None, None) == 0\n"  # PTRACE_SEIZE
                "print('traces', flush=True); time.sleep(600)",
            ],
            stdout=subprocess.PIPE,
        )
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"traces\n"
        bench.kill(agent)
        assert wait(bench.free)
        assert tracer.wait(30) == -signal.SIGKILL
        with TcpSockets([holder.pid]) as sockets:
            assert [s.socket.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR) for s in sockets] == [0]
    finally:
        for process in (holder, tracer):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()
        client.close()
        server.close()


@both_versions
@pytest.mark.criu
def test_agent_killed_at_any_instant_of_a_dump(
    bench: Bench, container: Callable[..., Container], tmp_path: Path
) -> None:
    """CRIU outlives it; the tree runs on all the same, and what it says over its connections arrives."""
    box = bench.box = container("talk", 3, whole=True)
    os.close(bench.netns)
    bench.netns = os.open(f"/proc/{box.pid1}/ns/net", os.O_RDONLY)
    (tmp_path / "images").mkdir()
    for delay in (0.0, 0.01, 0.02, 0.04, 0.08):
        agent = bench.agent("arm", "freeze", "lock")
        with bench.freezer as freezer:
            criu = dump(box.pid1, box.inner, freezer.fd, tmp_path / "images")
        time.sleep(delay)
        bench.kill(agent)
        assert criu.wait(30) == 0
        assert wait(lambda: bench.guardians() == [])
        assert bench.free()
        before = box.words()[:3]
        assert wait(lambda before=before: all(map(int.__gt__, box.words(), before)))
        bench.state.forget_tree("8a5e.0")


@pytest.mark.criu
def test_stuck_criu_of_a_killed_agent_is_killed(
    bench: Bench, container: Callable[..., Container], tmp_path: Path
) -> None:
    box = bench.box = container("talk", 3, whole=True)
    os.close(bench.netns)
    bench.netns = os.open(f"/proc/{box.pid1}/ns/net", os.O_RDONLY)
    (tmp_path / "images").mkdir()
    agent = bench.agent("arm", "freeze", "lock")
    with bench.freezer as freezer:
        criu = dump(box.pid1, box.inner, freezer.fd, tmp_path / "images")
    os.killpg(criu.pid, signal.SIGSTOP)
    bench.kill(agent)
    assert wait(lambda: bench.guardians() == [])
    assert bench.free()
    assert criu.wait(30) == -signal.SIGKILL
    assert box.runs()


def test_guardian_that_cannot_start_leaves_nothing(bench: Bench) -> None:
    agent = bench.agent()
    os.rmdir(bench.freezer.path)
    assert "its guardian does not start: GroupGone" in bench.tell(agent, "arm")
    assert os.listdir(bench.path / "state") == []


def deadline(bench: Bench) -> int:
    tree = bench.state.read_tree("8a5e.0")
    assert isinstance(tree, FrozenTree)
    return tree.deadline
