"""Suspend and resume by the real controller, on a real API, with the real webhook and the agents' real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lightkube import Client
from lightkube.resources.core_v1 import Event, Pod
from tests.kube.objects import let_read_secret, policy
from tests.kube.processes import Controllers
from tests.kube.training import Training

from stasis.api import names
from stasis.core.steps import Step
from stasis.errors import CheckpointFailed, Corrupt, Finding, Refused
from stasis.kube.client import Checkpoints, JobSets, Policies, Secrets, TrainJobs, annotation, meta
from stasis.plugin.cli import main as plugin
from stasis.store.checkpoint import list_checkpoints

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("webhook")]


@pytest.fixture
def training(
    controllers: Controllers, client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    controllers.only(1)
    with Training(controllers, client, namespace, tmp_path) as training:
        training.until(controllers.leader, "a controller leads")
        monkeypatch.setattr("stasis.daemon.preflight.word", lambda body: training.world.word(body["container_id"]))
        yield training
        assert not training.trouble, training.trouble


def stasis(training: Training, *arguments: str) -> Result:
    env = {"KUBECONFIG": str(training.controllers.api.kubeconfig)}
    return CliRunner().invoke(plugin, ["-n", training.namespace, *arguments], env=env)


def cycle(training: Training) -> None:
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.until(lambda: training.holds("Released"), "it is released")
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()


def reason(training: Training, kind: str) -> tuple[str, str]:
    """Reason and message of a condition of the last checkpoint."""
    conditions = (training.checkpoints()[-1].get("status") or {}).get("conditions") or ()
    return next(((c["reason"], c["message"]) for c in conditions if c["type"] == kind), ("", ""))


def test_a_training_is_suspended_and_resumed_where_it_stopped_again_and_again(training: Training) -> None:
    training.start()
    training.suspend()
    training.until(lambda: training.holds("Released"), "it is released")
    training.until(training.suspended, "its pods are gone")
    checkpoint = training.checkpoints()[-1]
    assert training.gate() == f"held/{meta(checkpoint)['name']}"
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    cycle(training)
    assert training.unbroken()
    training.until(lambda: bool(training.checkpoints()[-1]["status"].get("tag")), "it is published")
    first, second = (c["status"] for c in training.checkpoints())
    assert [rank["addresses"][0] for rank in first["ranks"]] == [rank["addresses"][0] for rank in second["ranks"]]
    assert second["ranks"][0]["seconds"].keys() >= {"freeze", "capture", "store"}
    assert float(second["frozenSeconds"]) > 0
    assert second["ranks"][0]["podIP"] not in ("", second["ranks"][0]["addresses"][0])
    assert second["size"].endswith("KiB")
    told = training.events()
    assert [told.count(one) for one in ("Released", "Restored", "Resuming", "Checkpointing")] == [2, 2, 2, 2]


def test_a_suspend_taken_back_at_once_leaves_the_training_running(training: Training) -> None:
    training.start()
    for _ in range(5):
        training.suspend()
        time.sleep(0.05)  # in the midst of it, or when it is released already: nobody can tell
        training.resume()
    training.until(lambda: training.runs() and training.settled(), "all is over")
    training.progress()
    assert training.unbroken()
    jobset = training.get(JobSets)
    assert jobset is not None
    assert not jobset["spec"].get("suspend")


def test_a_training_that_does_not_run_yet_is_suspended_at_once(training: Training) -> None:
    training.pending = True
    training.create()
    training.until(lambda: len(training.pods()) == 2, "its pods are there")
    training.suspend()
    training.until(training.suspended, "it is suspended")
    assert training.checkpoints() == []
    assert "NothingToSave" in training.events()
    training.pending = False
    training.resume()
    training.until(training.runs, "it runs")


def test_a_job_made_suspended_starts_as_ever(training: Training) -> None:
    training.create(suspend=True)
    training.until(lambda: training.get(JobSets), "its JobSet is there")
    training.resume()
    training.until(training.runs, "it runs")
    assert training.checkpoints() == []


def test_what_cannot_be_checkpointed_runs_on_or_is_suspended_as_the_policy_says(training: Training) -> None:
    finding = Finding("userfaultfd", "do without it", 7, "python")
    training.world.failing[Step.PREPARE] = Refused([finding])
    training.start()
    training.suspend()
    training.until(lambda: training.holds("Failed"), "it is refused")
    assert "userfaultfd" in reason(training, "Failed")[1]
    training.progress()
    training.client.create(policy("default", training.namespace, onFailure="Suspend"))
    training.until(training.suspended, "it is suspended all the same")
    assert "SuspendedWithoutCheckpoint" in training.events()


def test_a_rank_that_cannot_freeze_does_not_hold_the_others(training: Training) -> None:
    training.world.failing[Step.CAPTURE] = CheckpointFailed("no")
    training.start()
    training.suspend()
    training.until(lambda: training.holds("Failed"), "it failed")
    training.progress()
    training.world.failing.clear()
    training.until(training.suspended, "the next attempt succeeds")
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    assert training.unbroken()


def test_discard_suspends_without_saving(training: Training) -> None:
    training.start()
    training.patch(TrainJobs, {"metadata": {"annotations": {names.DISCARD: "true"}}, "spec": {"suspend": True}})
    training.until(training.suspended, "it is suspended")
    assert training.checkpoints() == []


def test_a_checkpoint_that_a_user_makes_is_taken_beside_the_training(training: Training) -> None:
    training.start()
    job = training.get(TrainJobs)
    body = {"metadata": {"name": "mine", "namespace": training.namespace}}
    spec = {"trainJob": {"name": training.name, "uid": meta(job)["uid"]}}
    training.client.create(Checkpoints.from_dict({**body, "spec": spec}))
    training.until(lambda: training.holds("Durable", "mine"), "it is durable")
    training.progress()
    assert training.unbroken()
    cycle(training)
    assert training.unbroken()
    training.client.delete(Checkpoints, "mine", namespace=training.namespace)
    training.until(lambda: training.get(Checkpoints, "mine") is None, "it is deleted")


def test_the_plugin_s_check_tells_what_stands_against_a_checkpoint_of_a_running_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Finding] = []
    answer = {"needs": {}}
    monkeypatch.setattr(
        "stasis.daemon.preflight.check", lambda body: {**answer, "findings": [f.as_dict() for f in found]}
    )
    training.create(suspend=True)
    training.until(lambda: training.get(JobSets), "its JobSet is there")
    assert "nothing of it runs" in stasis(training, "check", "gpt").stderr
    training.resume()
    training.until(training.runs, "the training runs")
    assert stasis(training, "check", "gpt").exit_code == 0
    found.append(Finding("userfaultfd", "do without it", 7, "python"))
    result = stasis(training, "check", "gpt")
    assert result.exit_code == Refused.exit_code
    assert "do without it" in result.output
    told = [event for event in training.events() if event.startswith("Check")]
    assert sorted(told) == ["CheckFound", "CheckFound", "Checked"]
    assert not annotation(training.get(TrainJobs), names.CHECK)
    assert training.checkpoints() == []


def saved(training: Training, name: str, rank: int) -> int:
    """The number at which a checkpoint has a rank."""
    status = (training.get(Checkpoints, name) or {})["status"]
    return training.world.saved[next(r["manifest"] for r in status["ranks"] if r["rank"] == rank)]


@pytest.mark.parametrize("which", ["gpt-1", "mine"])
def test_a_training_goes_on_from_an_older_checkpoint_or_one_that_was_taken_beside_it(
    training: Training, which: str
) -> None:
    training.start()
    cycle(training)
    ask(training, "mine")
    training.until(lambda: training.holds("Durable", "mine"), "it is durable")
    training.progress()
    training.suspend()
    training.until(training.suspended, "it is suspended")
    printed, first = len(training.world.lines[0]), saved(training, which, 0) + 1
    result = stasis(training, "resume", "gpt", "--from", which)
    assert result.exit_code == 0, result.stderr
    training.progress()
    training.until(lambda: training.holds("Restored", which), "it is restored")
    cycle(training)
    lines = training.world.lines[0][printed:]
    assert lines == list(range(first, first + len(lines)))


def test_a_training_made_anew_under_the_name_can_go_on_from_what_the_one_before_saved(training: Training) -> None:
    training.start()
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.client.delete(TrainJobs, training.name, namespace=training.namespace)
    training.until(lambda: training.get(JobSets) is None and not training.pods(), "all is gone")
    training.create(suspend=True)
    training.until(lambda: "CheckpointsOfNamesake" in training.events(), "the user is told")
    printed, first = len(training.world.lines[0]), saved(training, "gpt-1", 0) + 1
    result = stasis(training, "resume", "gpt", "--from", "gpt-1")
    assert result.exit_code == 0, result.stderr
    training.progress()
    assert training.world.lines[0][printed] == first
    assert training.events().count("CheckpointsOfNamesake") == 1
    training.until(lambda: training.holds("Restored", "gpt-2"), "it is restored, from a copy of its own")
    cycle(training)


def test_what_the_ranks_find_to_be_other_than_it_was_is_told(training: Training) -> None:
    changed = "/data/log has 5 bytes, and had 3"
    training.world.results[Step.PLACE] = {"volumes": [changed], "machine": []}
    training.start()
    cycle(training)
    training.until(lambda: "VolumeChanged" in training.events(), "the user is told")
    told = [e for e in training.client.list(Event, namespace=training.namespace) if e.reason == "VolumeChanged"]
    assert [e.message for e in told] == [f"rank 0: {changed}; rank 1: {changed}"]
    assert "MachineChanged" not in training.events()


def test_a_choice_that_cannot_be_had_is_refused_once(training: Training) -> None:
    training.start()
    training.suspend()
    training.until(training.suspended, "it is suspended")
    held = training.gate().removeprefix("held/")
    change = {"metadata": {"annotations": {names.FROM: f"nothing/{held}"}}, "spec": {"suspend": False}}
    training.patch(TrainJobs, change)
    training.until(lambda: "CheckpointRefused" in training.events(), "it is refused")
    assert training.suspended()
    training.patch(TrainJobs, {"metadata": {"annotations": {names.FROM: None}}})
    training.until(lambda: training.holds("Restored"), "it is resumed from the last one")
    training.progress()
    assert training.unbroken()
    assert training.events().count("CheckpointRefused") == 1


def test_a_fork_goes_on_from_the_checkpoint_of_another_training_which_runs(training: Training, tmp_path: Path) -> None:
    training.start()
    cycle(training)
    with Training(training.controllers, training.client, training.namespace, tmp_path / "fork", "fork") as fork:
        fork.world.saved = training.world.saved
        result = stasis(training, "fork", "fork", "--from", "gpt-1")
        assert result.exit_code == 0, result.stderr
        fork.until(lambda: fork.holds("Restored", "fork-1"), "it is restored")
        fork.progress()
        assert fork.world.lines[1][0] == saved(training, "gpt-1", 1) + 1
        training.client.delete(Checkpoints, "gpt-1", namespace=training.namespace)
        training.until(lambda: training.get(Checkpoints, "gpt-1") is None, "the origin is deleted")
        fork.suspend()
        fork.until(fork.suspended, "it is suspended, to a checkpoint of its own")
        fork.resume()
        fork.until(lambda: fork.holds("Restored", fork.checkpoints()[-1]["metadata"]["name"]), "it is restored again")
        first, second = (c["status"]["repository"] for c in fork.checkpoints())
        assert first != second
        assert not fork.trouble
    training.progress()
    assert training.unbroken()


def test_the_user_is_told_who_has_an_address_that_a_restored_rank_still_goes_by(training: Training) -> None:
    training.start()
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.until(lambda: bool(training.checkpoints()[-1]["status"].get("tag")), "it is published")
    address = training.checkpoints()[-1]["status"]["ranks"][1]["addresses"][0]
    about = {"name": "neighbour", "namespace": training.namespace}
    spec = {"containers": [{"name": "c", "image": "i"}], "terminationGracePeriodSeconds": 0}
    training.client.create(Pod.from_dict({"metadata": about, "spec": spec}))
    at = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    training.client.patch(Pod.Status, "neighbour", {"status": at}, namespace=training.namespace)
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.until(lambda: "AddressTaken" in training.events(), "the user is told")
    found = training.client.list(Event, namespace=training.namespace)
    text = f"pod {training.namespace}/neighbour has the former address {address} of rank 1"
    assert len([event for event in found if event.reason == "AddressTaken" and text in str(event.message)]) == 1
    assert training.checkpoints()[-1]["status"]["addressMeans"] == "Translate"


def ask(training: Training, name: str, uid: str = "", **spec: str) -> None:
    """For a checkpoint beside the training, as a user does."""
    job = training.get(TrainJobs)
    about = {"name": training.name, "uid": uid or meta(job)["uid"]}
    body = {"metadata": {"name": name, "namespace": training.namespace}, "spec": {"trainJob": about, **spec}}
    training.client.create(Checkpoints.from_dict(body))


def refused(training: Training, name: str) -> tuple[str, str]:
    training.until(lambda: training.holds("Failed", name), f"{name} fails")
    conditions = (training.get(Checkpoints, name) or {})["status"]["conditions"]
    return next((c["reason"], c["message"]) for c in conditions if c["type"] == "Failed")


def test_a_checkpoint_of_what_does_not_run_fails_with_the_cause(training: Training) -> None:
    ask(training, "nobody", uid="0e7d1c2b-0000-4000-8000-000000000000")
    assert refused(training, "nobody")[0] == "NotFound"
    training.create(suspend=True)
    training.until(lambda: training.get(JobSets), "its JobSet is there")
    ask(training, "early")
    assert refused(training, "early") == ("NotRunning", "there is nothing to save: the job is suspended, or to be")


def test_what_the_policy_does_not_allow_is_refused_by_name(training: Training) -> None:
    training.start()
    ask(training, "abroad", repository="registry.elsewhere.test/mine")
    assert refused(training, "abroad")[0] == "Denied"
    training.progress()
    assert training.unbroken()
    assert "Denied" in training.events()


def test_what_cannot_be_restored_stays_suspended_until_the_user_says_something_else(training: Training) -> None:
    training.start()
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.world.failing[Step.LAY] = Corrupt("a blob is not what it was")
    training.resume()
    training.until(lambda: reason(training, "Restored")[0] == "Corrupt", "it is not restored")
    training.until(training.suspended, "it is suspended again")
    assert "a blob is not" in reason(training, "Restored")[1]
    training.world.failing.clear()
    training.suspend()
    training.resume()
    training.until(lambda: training.holds("Restored"), "it is restored")
    training.progress()
    assert training.unbroken()


def test_what_cannot_be_restored_begins_anew_where_the_policy_says_so(training: Training) -> None:
    training.client.create(policy("default", training.namespace, onRestoreFailure="StartFresh"))
    training.start()
    training.suspend()
    training.until(training.suspended, "it is suspended")
    training.world.failing[Step.LAY] = Corrupt("a blob is not what it was")
    training.resume()
    training.until(training.runs, "it runs")
    training.until(lambda: "StartedFresh" in training.events(), "the user is told")
    assert not training.unbroken()


def test_a_pod_made_anew_after_its_gang_was_restored_runs_its_command(training: Training) -> None:
    training.start()
    cycle(training)
    victim = training.pods()[1].metadata.name
    training.client.delete(Pod, victim, namespace=training.namespace)
    training.until(
        lambda: len(training.pods()) == 2 and victim not in [p.metadata.name for p in training.pods()], "anew"
    )
    training.until(training.runs, "it runs")
    training.until(lambda: "PlaceholderReleased" in training.events(), "the user is told")


@pytest.mark.parametrize("step", [Step.PREPARE, Step.CAPTURE, Step.STORE])
def test_a_job_deleted_in_the_middle_of_its_checkpoint_leaves_nothing(training: Training, step: Step) -> None:
    training.start()

    def delete(at: Step, rank: int) -> None:
        if at is step and rank == 0:
            training.world.on_step = lambda step, rank: None
            training.client.delete(TrainJobs, training.name, namespace=training.namespace)

    training.world.on_step = delete
    training.suspend()
    training.until(lambda: training.get(JobSets) is None and not training.pods(), "all is gone")
    training.until(lambda: training.settled(), "the operation is over")
    assert training.world.states() == []
    training.create()
    training.until(training.runs, "one made anew under the name starts fresh")


def test_old_checkpoints_are_deleted_with_their_bytes_and_the_namespaces_bytes_bounded(training: Training) -> None:
    retention = {"keep": 1, "maxBytes": "1Mi"}
    training.client.create(policy("default", training.namespace, retention=retention))
    training.start()
    cycle(training)
    cycle(training)
    cycle(training)
    training.until(lambda: [meta(c)["name"] for c in training.checkpoints()] == ["gpt-5"], "one is kept")
    repository = training.checkpoints()[-1]["status"]["repository"]
    assert [listed.tag for listed in list_checkpoints(repository)] == ["gpt-5"]
    change = {"spec": {"retention": {"maxBytes": "1"}}}
    training.patch(Policies, change, "default")
    training.suspend()
    training.until(lambda: "allows 1 B" in reason(training, "Failed")[1], "there is no room")
    training.progress()


def test_the_checkpoints_of_a_deleted_job_go_where_the_policy_says_so(training: Training) -> None:
    training.client.create(policy("default", training.namespace, onDelete="Delete"))
    training.start()
    cycle(training)
    repository = training.checkpoints()[-1]["status"]["repository"]
    training.client.delete(TrainJobs, training.name, namespace=training.namespace)
    training.until(lambda: training.checkpoints() == [], "they are deleted")
    assert list_checkpoints(repository) == []


def test_a_fork_that_would_write_to_the_volumes_of_a_running_training_is_refused(
    training: Training, tmp_path: Path
) -> None:
    training.claims = ["data"]
    training.start()
    cycle(training)
    with Training(training.controllers, training.client, training.namespace, tmp_path / "fork", "fork") as fork:
        fork.world.saved, fork.claims = training.world.saved, ["data"]
        fork.create(suspend=True)
        fork.patch(TrainJobs, {"metadata": {"annotations": {names.FROM: "gpt-1"}}})
        training.until(lambda: "CheckpointRefused" in training.events(), "it is refused")
        assert fork.gate() == ""
        fork.patch(TrainJobs, {"metadata": {"annotations": {names.SHARE_VOLUMES: "true"}}})
        fork.until(lambda: fork.gate() == "held/fork-1", "it is accepted")


def test_how_far_a_checkpoint_is_can_be_watched(training: Training) -> None:
    training.start()
    watched = threading.Event()
    training.world.on_step = lambda step, rank: watched.wait(20) if step is Step.STORE else None
    training.suspend()

    def standing() -> bool:
        status = training.checkpoints()[-1].get("status") or {}
        uploaded = [rank.get("uploadedBytes") for rank in status.get("ranks") or ()]
        return status.get("message") == "store: 4.0 KiB of 8.0 KiB" and uploaded == [2048, 2048]

    training.until(lambda: training.checkpoints() and standing(), "it is told")
    assert "store: 4.0 KiB" in stasis(training, "status", "gpt").output
    watched.set()
    training.until(training.suspended, "it is suspended")
    training.until(lambda: training.holds("Released"), "it is released")
    assert training.checkpoints()[-1]["status"].get("message", "") == ""


def test_what_goes_on_is_measured(training: Training) -> None:
    training.world.failing[Step.CAPTURE] = CheckpointFailed("no")
    training.start()
    training.suspend()
    training.until(lambda: training.holds("Failed"), "it failed")
    text = training.controllers.metrics()
    assert "stasis_leader 1.0" in text
    assert f'stasis_deferred_seconds{{namespace="{training.namespace}",trainjob="gpt"}}' in text
    assert 'stasis_operations_total{kind="release",outcome="aborted"}' in text


def test_the_registrys_credentials_come_from_the_jobs_namespace_with_the_orders(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[str] = []
    monkeypatch.setattr("stasis.store.credentials.hand_over", lambda host, name, text: handed.append(text))
    text = '{"auths":{"registry.test":{"auth":"dXNlcjpwYXNz"}}}'
    body = {
        "metadata": {"name": "registry", "namespace": training.namespace},
        "stringData": {".dockerconfigjson": text},
    }
    training.client.create(Secrets.from_dict({**body, "type": "kubernetes.io/dockerconfigjson"}))
    let_read_secret(training.client, training.namespace, "registry")
    training.client.create(policy("default", training.namespace, storage={"secretName": "registry"}))
    training.start()
    cycle(training)
    assert set(handed) == {text}
    training.client.delete(Secrets, "registry", namespace=training.namespace)
    training.suspend()
    training.until(training.suspended, "it comes to its end without them too")
    assert "NotFound" in training.events()
