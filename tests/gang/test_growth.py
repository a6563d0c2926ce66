"""After a hundred checkpoints nothing has grown that had not after ten."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gang.lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(1800)]

MakeLab = Callable[..., Lab]


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def counts(one: Lab) -> dict[str, int]:
    """What each checkpoint takes and has to give back."""
    pids = {pid for rank in one.gang.places for pid in one.processes(rank)}
    state = one.gang.folder.with_name("gang.state")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "processes of the gang": len(pids),
        "descriptors of the gang": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
        "state": len([path for path in state.rglob("*") if path.is_file()]),
        "cgroups": len(list(Path("/sys/fs/cgroup").glob(f"**/*{one.name}*/**/"))),
        "namespaces": len(list(Path("/run/netns").glob(f"*{one.name}*"))),
        "mounts": Path("/proc/self/mountinfo").read_text().count(one.name),
    }


def memory() -> int:
    """Resident bytes of this process, which is the agent."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(one: Lab, work: Callable[[int], str], warm: int, last: int) -> None:
    """Nothing may be there after `last` times of work that was not after `warm` times. The work tells its operation."""
    seen, ops = {}, []
    for cycle in range(1, last + 1):
        ops.append(work(cycle))
        if cycle in (warm, last):
            one.progress(1)
            seen[cycle] = counts(one), memory(), size(one.folder / "store")
    (before, resident, stored), (after, resident_after, stored_after) = seen[warm], seen[last]
    assert after == before
    assert resident_after <= resident * 1.05
    assert stored_after <= stored * 1.5  # a pack of an earlier checkpoint stays whole as long as any of it is in use
    reserved = os.listdir(Path(os.environ.get("STASIS_STATE") or "/var/lib/stasis") / "reservations")
    assert [name for name in reserved if any(op in name for op in ops)] == []
    one.progress()
    one.finish()


def test_a_hundred_checkpoints_leave_nothing_behind(lab: MakeLab) -> None:
    one = lab(env={"BALLAST": str(16 << 20)}, pause=0.5)
    grown(one, lambda cycle: one.operator.checkpoint().op, 10, 100)


def test_a_hundred_moves_leave_nothing_behind(lab: MakeLab) -> None:
    one = lab(pause=0.5)  # this process keeps the logs, too

    def move(cycle: int) -> str:
        op = one.operator.suspend().op
        one.gang.wait(10)
        one.operator.resume(new_addresses=cycle % 2 == 0)
        return op

    grown(one, move, 10, 100)
