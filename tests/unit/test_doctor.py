"""What `stasis doctor` says of this machine, and of machines that lack something."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from stasis import doctor
from stasis.doctor import kernel, machine, programs
from stasis.doctor.check import NEW_MOUNTS, NEW_NETWORK, Check, Need, Status, apart, mount_tmpfs
from stasis.errors import Unsupported

ALL = (1 << 41) - 1
NEED = Need("area", "thing", "without it nothing works", "buy one")


def printed(found: list[Check], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, emoji=False)
    console.print(doctor.table(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def by_name(found: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


@pytest.mark.root
def test_a_machine_that_runs_these_tests_has_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    for check in told["checks"]:
        assert list(check) == ["area", "name", "status", "found", "meaning", "remedy"]
        assert check["found"]
        assert check["meaning"]
        assert check["status"] != "lack"
        assert check["status"] == "ok" or check["remedy"]


@pytest.mark.root
def test_nothing_is_left_behind() -> None:
    def seen() -> tuple[object, ...]:
        links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
        rules = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
        groups = [str(path) for path in Path("/sys/fs/cgroup").rglob(f"stasis-doctor-{os.getpid()}")]
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return "doctor" in links, "doctor" in rules, groups, mounts.count("/run")

    before = seen()
    assert doctor.checks()
    assert seen() == before
    assert before[:3] == (False, False, [])


@pytest.mark.root
@pytest.mark.parametrize(
    ("become", "words", "lacking"),
    [
        (
            "os.setgroups([]); os.setgid(1000); os.setuid(1000)",
            ["user 1000", "not tried: that takes root", "remedy: run as root"],
            {"root", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE"},
        ),
        (
            "os.execvp('setpriv', ['setpriv', '--bounding-set', '-all', '--inh-caps', '-all', sys.executable, '-c', "
            "'from stasis import doctor; raise SystemExit(doctor.run(False))'])",
            ["user 0", "not permitted: Operation not permitted", "--privileged"],
            {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "cgroup freezer", "TCP_REPAIR", "nftables", "criu check"},
        ),
    ],
    ids=["without root", "without capabilities"],
)
def test_without_privileges_it_says_what_is_lacking_and_fails(become: str, words: list[str], lacking: set[str]) -> None:
    script = f"import os, sys\nfrom stasis import doctor\n{become}\nsys.exit(doctor.run(False))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "1000"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == Unsupported.exit_code, done.stderr
    assert not done.stderr
    for text in words:
        assert text in done.stdout
    verdict = done.stdout.splitlines()[-1].split(";")[0].removeprefix("lacking: ").split(", ")
    assert lacking <= set(verdict)


@pytest.mark.parametrize("name", machine.CAPABILITIES)
def test_a_missing_capability_is_named_with_what_its_lack_means(name: str) -> None:
    number, needed, meaning = machine.CAPABILITIES[name]
    found = by_name(list(machine.capabilities(ALL & ~(1 << number))))
    assert found[name].status is (Status.LACK if needed else Status.WARN)
    assert meaning in found[name].meaning
    assert all(check.status is Status.OK for other, check in found.items() if other != name)


def test_the_numbers_of_the_capabilities_are_the_kernels() -> None:
    header = Path("/usr/include/linux/capability.h").read_text()
    for name, (number, _, _) in machine.CAPABILITIES.items():
        assert any(line.split()[:3] == ["#define", name, str(number)] for line in header.splitlines()), name


def test_little_memory_and_disk_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = machine.memory(["MemTotal:  16777216 kB", "MemFree: 9 kB", "MemAvailable:  1048576 kB"])
    assert (short.status, short.found) == (Status.WARN, "1.0 GiB available of 16.0 GiB")
    assert machine.memory(["MemTotal:  16777216 kB", "MemAvailable:  8388608 kB"]).status is Status.OK
    missing = tmp_path / "not" / "there"
    assert machine.disk("disk", missing).found.endswith(f"free at {missing}")
    monkeypatch.setattr(machine, "DISK", 1 << 60)
    assert machine.disk("disk", missing).status is Status.WARN


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw", "shared"),
        ("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw", "private"),
        ("27 1 254:0 / / rw,relatime master:1 - ext4 /dev/vda rw", "private"),
    ],
)
def test_the_propagation_of_mounts_is_told(line: str, word: str) -> None:
    others = ["20 27 0:5 / /proc rw shared:9 - proc proc rw", line]
    assert machine.propagation(others).found.startswith(word)


@pytest.mark.parametrize(
    ("disabled", "answers", "words"),
    [
        (None, False, ["no policy", "denied to this process"]),
        ("0", True, ["allowed to all", "answers"]),
        ("1", False, ["allowed to some", "denied"]),
        ("2", False, ["forbidden", "denied"]),
        ("3", False, ["3"]),
    ],
)
def test_the_policy_on_io_uring_is_told_with_what_init_does(
    disabled: str | None, answers: bool, words: list[str]
) -> None:
    check = kernel.io_uring(disabled, answers)
    assert check.status is Status.OK
    assert all(word in check.found for word in words)
    assert "no_new_privs" in check.meaning


def test_pieces_that_are_not_built_are_named_with_their_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STASIS_CRIU", "STASIS_INIT", "STASIS_ROOTFS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STASIS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(list(programs.checks()))
    for name, script in [("CRIU", "tools/criu.sh"), ("init", "tools/init.sh"), ("runc", "install runc")]:
        assert found[name].status is Status.LACK
        assert script in found[name].remedy
    assert found["training image"].status is Status.WARN


def test_what_does_not_start_is_no_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "criu").write_text("")
    loader = tmp_path / "ld-linux-x86-64.so.2"
    loader.write_text("#!/bin/sh\necho broken bundle >&2\nexit 1\n")
    loader.chmod(0o755)
    monkeypatch.setenv("STASIS_CRIU", str(tmp_path))
    found = by_name(list(programs.checks()))
    assert found["CRIU"].status is Status.LACK
    assert "broken bundle" in found["CRIU"].found


def raising(error: Exception) -> Callable[[], str]:
    def probe() -> str:
        raise error

    return probe


@pytest.mark.root
@pytest.mark.parametrize(
    ("error", "found", "remedy"),
    [
        (OSError("no such thing\nmore of it"), "no such thing", "buy one"),
        (PermissionError(1, "Operation not permitted", "/x"), "not permitted: Operation not permitted", "privileges"),
        (ValueError(), "ValueError", "buy one"),
    ],
)
def test_a_trial_that_fails_is_a_lack_with_its_cause(error: Exception, found: str, remedy: str) -> None:
    check = NEED.tried(raising(error))
    assert (check.status, check.found) == (Status.LACK, found)
    assert remedy in check.remedy


@pytest.mark.root
def test_a_trial_apart_leaves_this_process_where_it_is() -> None:
    def where() -> tuple[str, str]:
        return os.readlink("/proc/thread-self/ns/net"), os.readlink("/proc/thread-self/ns/mnt")

    seen: list[tuple[str, str]] = []

    def probe() -> str:
        mount_tmpfs(Path("/run"))
        seen.append(where())
        return str(len(os.listdir("/run")))

    before, run = where(), os.listdir("/run")
    assert apart(NEW_NETWORK | NEW_MOUNTS, probe)() == "0"
    assert where() == before
    assert run == os.listdir("/run")
    assert seen[0][0] != before[0]
    assert seen[0][1] != before[1]
    with pytest.raises(ValueError, match="out"):
        apart(NEW_NETWORK, raising(ValueError("out")))()


def test_the_table_shows_what_a_lack_means_and_one_remedy_of_several_once() -> None:
    lack = [NEED.seen(False, f"no [b]{name}[/b]") for name in ("first", "second")]
    text = printed([*lack, NEED.seen(True, "all :smile: here")])
    assert text.count("without it nothing works") == 2
    assert text.count("buy one") == 1
    assert "no [b]second[/b]" in text
    assert "all :smile: here" in text
