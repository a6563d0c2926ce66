"""A gang goes through suspensions, checkpoints and moves as if nothing had happened."""

from collections.abc import Callable

import pytest
from tests.gang.lab import Lab

from stasis.agent import admission, provision
from stasis.agent.volume import put_into_volume
from stasis.core.steps import Step
from stasis.demo.proof import steps
from stasis.store.checkpoint import verify

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("translate", [False, True], ids=["kept", "translated"])
def test_ten_suspensions_in_a_row(lab: MakeLab, ranks: int, translate: bool) -> None:
    one = lab(ranks)
    for _ in range(10):
        one.progress()
        one.operator.suspend()
        assert one.gang.wait(10) == dict.fromkeys(range(ranks), 143)
        one.operator.resume(new_addresses=translate)
    one.progress()
    one.finish()


def test_a_second_checkpoint_stores_what_changed(lab: MakeLab) -> None:
    one = lab(2, env={"BALLAST": str(32 << 20)})
    stored = []
    for _ in range(2):
        one.progress()
        report = one.operator.checkpoint()
        stored.append(sum(result["stats"]["stored"] for result in report.results[Step.STORE].values()))
    assert stored[0] > 64 << 20
    assert stored[1] < stored[0] / 10
    one.finish()


def test_ten_checkpoints_while_training_goes_on_then_the_last_one(lab: MakeLab) -> None:
    """What was done after the last checkpoint is done again, once, by the same processes: per incarnation."""
    one = lab(2)
    for _ in range(10):
        one.progress(2)
        one.operator.checkpoint()
        assert one.frozen() == []
    one.progress(5)
    for place in one.gang.places.values():
        place.container.delete()
    lost = {rank: one.gang.lines[rank][:] for rank in range(2)}
    for rank in range(2):
        one.gang.lines[rank].clear()
    one.operator.resume()
    one.progress()
    (one.control / "stop").touch()
    assert one.gang.wait(60.0) == {0: 0, 1: 0}, one.tails()
    for rank in range(2):
        first = steps(one.gang.lines[rank])[0].number
        assert 0 < first <= len(steps(lost[rank])) - 4  # the steps after the last checkpoint are done again
    one.check({rank: [*_until(lost[rank], one.gang.lines[rank]), *one.gang.lines[rank]] for rank in range(2)})


def _until(before: list[str], after: list[str]) -> list[str]:
    """The lines before the step that the restored incarnation began with."""
    first = steps(after)[0].number
    return [line for line in before if (found := steps([line])) and found[0].number < first]


def test_what_is_stored_can_be_verified(lab: MakeLab) -> None:
    one = lab(2)
    one.progress()
    one.operator.checkpoint()
    assert verify(one.where) > 1 << 20
    one.finish()


def test_the_build_of_init_comes_with_the_checkpoint_where_the_node_has_another(
    lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[bytes] = []

    def record(pid1: int, folder: str, name: str, data: bytes) -> None:
        put.append(data)
        put_into_volume(pid1, folder, name, data)

    one = lab(2)
    one.progress()
    one.operator.suspend()
    monkeypatch.setattr(provision, "init_builds", dict)
    monkeypatch.setattr(admission, "put_into_volume", record)
    one.operator.resume()
    one.progress()
    one.finish()
    assert set(put) == {provision.init().read_bytes()}
