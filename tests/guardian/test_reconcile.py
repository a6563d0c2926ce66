"""A restarted agent finds what its predecessor froze, and what was decided over it."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from tests.guardian.bench import Bench, kill_guardian
from tests.guardian.conftest import wait

from stasis.agent import proctree
from stasis.agent.journal import Fate, FrozenTree
from stasis.agent.reconcile import Found, Standing, helper, reconcile
from stasis.core.records import Verdict

pytestmark = pytest.mark.root


@pytest.mark.parametrize(("bench", "guardian"), [("v1", "lives"), ("v2", "killed")], indirect=["bench"])
@pytest.mark.parametrize(
    ("words", "verdicts", "standing"),
    [
        (("arm",), (), Standing.RUNS),
        (("arm", "freeze", "lock"), (), Standing.RUNS),
        (("arm", "freeze", "lock", "vote"), (), Standing.WAITS),
        (("arm", "freeze", "lock", "vote"), (Verdict.COMMIT,), Standing.WAITS),
        (("arm", "freeze", "lock", "vote"), (Verdict.ABORT,), Standing.RUNS),
        (("arm", "freeze", "lock", "vote"), (Verdict.COMMIT, Verdict.CONTINUE), Standing.RUNS),
        (("arm", "freeze", "lock", "vote"), (Verdict.COMMIT, Verdict.RELEASE), Standing.RELEASED),
    ],
)
def test_restarted_agent_reconciles(
    bench: Bench, words: tuple[str, ...], verdicts: tuple[Verdict, ...], standing: Standing, guardian: str
) -> None:
    agent = bench.agent(*words)
    if guardian == "killed":
        kill_guardian(bench)
    for verdict in verdicts:
        bench.decide(verdict)
    bench.kill(agent)
    found = the_one(reconcile(bench.state))
    assert found.standing is standing
    assert found.guardian is not None
    if standing is Standing.WAITS:
        assert bench.frozen()
        assert len(bench.guardians()) == 1
        bench.decide(Verdict.ABORT if not verdicts else Verdict.CONTINUE)
    if standing is Standing.RELEASED:
        assert proctree.start_time(bench.box.root) == 0 or proctree.dead(bench.box.root)
    else:
        assert wait(bench.free)
        assert bench.box.runs()
    assert the_one(reconcile(bench.state)).fate is found.fate  # kept for whoever votes, until the freeze is settled
    found.guardian.stop()
    assert bench.guardians() == []
    assert os.listdir(bench.path / "state") == []
    assert reconcile(bench.state) == []


def test_release_is_carried_out_by_the_agents_own_means(bench: Bench) -> None:
    bench.kill(bench.agent("arm", "freeze", "vote"))
    bench.decide(Verdict.RELEASE)
    released: list[FrozenTree] = []
    assert the_one(reconcile(bench.state, released.append)).standing is Standing.RELEASED
    assert [tree.rank for tree in released] == [0]
    assert bench.frozen()


def test_helpers_of_a_killed_agent_are_ended(bench: Bench) -> None:
    mine, other = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2))
    try:
        noted = [helper(bench.state, process.pid) for process in (mine, other)]  # never left: the agent is killed
        for note in noted:
            note.__enter__()
        entry = bench.state.read("helper", str(other.pid))
        assert entry is not None
        bench.state.write("helper", str(other.pid), {**entry, "start": entry["start"] - 1})  # a pid used again
        reconcile(bench.state)
        assert mine.wait(30) == -signal.SIGKILL
        assert other.poll() is None
        assert bench.state.names("helper") == []
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_tree_gone_and_machine_restarted_are_told(bench: Bench) -> None:
    bench.kill(bench.agent("arm", "freeze", "vote"))
    tree = bench.state.read_tree("8a5e.0")
    assert isinstance(tree, FrozenTree)
    bench.state.write("tree", "8a5e.1", {**vars(tree), "rank": 1, "boot": "another"})
    bench.state.write("tree", "8a5e.2", {"op": "8a5e"})
    bench.freezer.kill()
    found = {one.name: (one.standing, one.fate) for one in reconcile(bench.state)}
    assert found == {
        "8a5e.0": (Standing.GONE, Fate.VOTED),
        "8a5e.1": (Standing.GONE, Fate.FIRED),
        "8a5e.2": (Standing.BROKEN, None),
    }


def the_one(found: list[Found]) -> Found:
    (one,) = found
    return one
