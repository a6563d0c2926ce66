"""What the store holds of a gang: the checkpoints that tags point to, nothing of those that came to nothing."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gang.lab import Lab, until

from stasis.errors import CheckpointFailed
from stasis.store.checkpoint import copy, list_checkpoints, verify

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]


def manifests(one: Lab) -> int:
    """How many manifests are in the store, tagged or not: a checkpoint of 2 ranks has 3."""
    index = json.loads((one.folder / "store/index.json").read_text())
    return len({manifest["digest"] for manifest in index["manifests"]})


def blobs(one: Lab) -> list[Path]:
    return list((one.folder / "store/blobs/sha256").iterdir())


def test_an_aborted_checkpoint_leaves_nothing_in_the_store(lab: MakeLab) -> None:
    """One rank is in the store already when the other one fails."""
    one = lab(env={"BALLAST1": str(300 << 20)})
    one.progress()
    container = one.gang.places[1].container
    state = one.gang.folder.with_name("gang.state")
    died = threading.Thread(target=lambda: until(lambda: any(state.glob("*.0.stored"))) and container.kill("KILL"))
    died.start()
    with pytest.raises(CheckpointFailed, match="rank 1"):
        one.operator.checkpoint()
    died.join()
    assert manifests(one) == 0
    assert blobs(one) == []


def test_of_an_agent_that_is_killed_while_it_stores_nothing_is_left(lab: MakeLab) -> None:
    one = lab()
    one.progress()
    one.operator.checkpoint()
    agent = one.agent("checkpoint")
    state = one.gang.folder.with_name("gang.state")
    assert until(lambda: any(state.glob("*.stored")))
    agent.send_signal(signal.SIGKILL)
    agent.communicate()
    outcomes = [report.outcome for report in one.operator.recover()]
    assert outcomes in (["aborted"], ["continued"])  # it may have been quick
    assert manifests(one) == 3
    assert list(state.glob("*.stored")) == []
    one.operator.checkpoint()
    assert manifests(one) == 3
    verify(one.where)
    one.progress()
    one.finish()


def test_a_replaced_checkpoint_is_removed_unless_another_tag_has_it(lab: MakeLab) -> None:
    one = lab()
    for _ in range(2):
        one.progress(1)
        one.operator.checkpoint()
    assert manifests(one) == 3
    copy(one.where, f"{one.folder}/store:other")
    for _ in range(2):
        one.operator.checkpoint()
    assert manifests(one) == 6
    assert sorted(listed.tag for listed in list_checkpoints(f"{one.folder}/store")) == ["other", "test"]
    verify(f"{one.folder}/store:other")
    verify(one.where)
    one.progress()
    one.finish()


@pytest.mark.slow
def test_a_replaced_checkpoint_stays_if_it_is_to_be_kept(lab: MakeLab) -> None:
    one = lab(keep=True)
    for _ in range(2):
        one.operator.checkpoint()
    assert manifests(one) == 6
    one.finish()


@pytest.mark.parametrize("verb", ["suspend", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_an_agent_that_is_killed_before_it_publishes_loses_no_step(lab: MakeLab, verb: str) -> None:
    """What is committed is what is resumed, not the checkpoint that the tag pointed to before."""
    one = lab()
    one.progress()
    one.operator.checkpoint()
    one.progress()
    agent = one.agent(verb, "publish")
    assert agent.wait(60) == -signal.SIGKILL
    agent.communicate()
    assert manifests(one) == 5
    assert [report.succeeded for report in one.operator.recover()] == [True]
    assert manifests(one) == 3
    if verb == "suspend":
        one.operator.resume()
    one.progress()
    one.finish()
