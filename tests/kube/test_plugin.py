"""`kubectl stasis` against a real API server; what other parts answer is written by the test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lightkube import Client
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType
from tests.kube.conftest import until
from tests.kube.played import RELEASED, Job, condition, meanwhile, operation
from tests.reader.checkpoint import CONFIG
from tests.registry.conftest import Registry
from tests.support.apiserver import ApiServer

from stasis.api import names
from stasis.core.records import Record, Verdict
from stasis.errors import NotFound, Unsupported
from stasis.kube.client import Checkpoints, TrainJobs, annotation, label
from stasis.plugin import wait
from stasis.plugin.cli import main
from stasis.plugin.cluster import asked as in_words
from stasis.plugin.names import KUEUE_QUEUE
from stasis.store.checkpoint import publish
from stasis.store.connect import open_repository
from stasis.store.writer import RankWriter

pytestmark = pytest.mark.kube


@pytest.fixture
def stasis(api: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
    monkeypatch.setattr(wait, "INTERVAL", 0.1)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["-n", namespace, *arguments])

    until(lambda: run("ls").exit_code == 0, "an API server that serves our new kinds")
    return run


def status_of(stasis, name: str = "gpt"):  # type: ignore[no-untyped-def]
    result = stasis("status", name, "-o", "json")
    assert result.exit_code == 0, result.stderr or result.exception
    return json.loads(result.stdout)


def test_status_of_a_running_job_tells_ranks_and_that_they_are_prepared(stasis, client: Client, namespace: str) -> None:
    Job(client, namespace).pods()
    found = status_of(stasis)
    assert (found["phase"], found["policyInForce"], found["notes"]) == ("Running", "default", [])
    assert [(r["rank"], r["node"], r["podIP"], r["prepared"]) for r in found["ranks"]] == [
        (0, "worker-0", "10.0.0.1", True),
        (1, "worker-1", "10.0.0.2", True),
    ]
    assert "Running" in stasis("status", "gpt").stdout


def test_status_says_that_a_later_label_counts_from_the_next_resume(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace, label=None)
    job.pods(**{names.PREPARED: ""})
    assert "not enabled" in stasis("status", "gpt").stdout
    client.patch(TrainJobs, "gpt", {"metadata": {"labels": {names.POLICY_LABEL: "default"}}}, namespace=namespace,
                 patch_type=PatchType.MERGE)  # fmt: skip
    assert "counts from the next resume" in status_of(stasis)["notes"][0]


def test_status_tells_the_address_that_processes_see_where_it_is_another(
    stasis, client: Client, namespace: str
) -> None:
    job = Job(client, namespace)
    ranks = [{"rank": 0, "addresses": ["10.9.9.9", "10.0.0.1"]}, {"rank": 1, "addresses": ["10.0.0.2"]}]
    uid = job.checkpoint("gpt-1", conditions=[*RELEASED, condition("Restored")], ranks=ranks, restores=1,
                         operations=[operation("o", "release", outcome="released"),
                                     operation("o-r2", "restore", 2, "restored")])  # fmt: skip
    job.pods(**{names.CHECKPOINT_UID: uid, names.CHECKPOINT: "gpt-1", names.RESTORE: "2"})
    found = status_of(stasis)
    assert (found["phase"], found["checkpoint"]) == ("Running", "gpt-1")
    assert [rank["address"] for rank in found["ranks"]] == ["10.9.9.9", ""]


def test_status_of_an_unknown_job_says_where_to_look(stasis) -> None:
    result = stasis("status", "nobody")
    assert (result.exit_code, "kubectl get trainjobs -A" in result.stderr) == (8, True)


def test_suspend_waits_until_the_checkpoint_is_released(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace)
    job.pods()
    with meanwhile(
        lambda: bool(job.get()["spec"].get("suspend")),
        lambda: job.checkpoint("gpt-1", operations=[operation("o", "release")], message="store: 1 MiB of 2 MiB"),
        lambda: job.status("gpt-1", *RELEASED, operations=[operation("o", "release", outcome="released")]),
        lambda: job.jobset(suspend=True, gate="held/gpt-1"),
        job.no_pods,
    ):
        result = stasis("suspend", "gpt", "--wait", "--timeout", "20s")
    assert result.stdout == "trainjob/gpt: suspended, saved as gpt-1\n"
    assert status_of(stasis)["phase"] == "Suspended"
    assert stasis("suspend", "gpt", "--wait", "--timeout", "5s").exit_code == 0  # once more: it is


def test_suspend_ends_with_the_cause_where_the_program_cannot_be_carried(
    stasis, client: Client, namespace: str
) -> None:
    job = Job(client, namespace)
    job.pods()
    cause = "rank 0: prepare: process 7 (python3): userfaultfd. Remedy: run without it"
    with meanwhile(
        lambda: bool(job.get()["spec"].get("suspend")),
        lambda: job.checkpoint("gpt-1", conditions=[condition("Failed", reason="Refused", message=cause)]),
    ):
        result = stasis("suspend", "gpt", "--wait", "--timeout", "20s")
    assert (result.exit_code, "userfaultfd" in result.stderr) == (3, True)
    assert "the suspend failed" in status_of(stasis)["detail"]


def test_a_wait_that_is_over_says_what_goes_on(stasis, client: Client, namespace: str) -> None:
    Job(client, namespace).pods()
    result = stasis("suspend", "gpt", "--wait", "--timeout", "0.3")
    assert (result.exit_code, "Suspending" in result.stderr, "cancel gpt" in result.stderr) == (11, True, True)


def test_a_job_that_is_not_enabled_is_suspended_only_by_discarding(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace, label=None)
    result = stasis("suspend", "gpt")
    assert (result.exit_code, "--discard" in result.stderr) == (2, True)
    assert not job.get()["spec"].get("suspend")
    assert stasis("suspend", "gpt", "--discard").exit_code == 0
    assert job.get()["spec"]["suspend"] is True
    assert annotation(job.get(), names.DISCARD) == "true"
    job.jobset(suspend=True)
    assert stasis("resume", "gpt").exit_code == 0
    assert annotation(job.get(), names.DISCARD) == ""


def test_kueue_s_jobs_are_left_to_kueue_by_name_of_the_field(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace)
    client.patch(TrainJobs, "gpt", {"metadata": {"labels": {KUEUE_QUEUE: "team"}}}, namespace=namespace,
                 patch_type=PatchType.MERGE)  # fmt: skip
    result = stasis("suspend", "gpt")
    assert result.exit_code == 2
    assert '{"spec":{"active":false}}' in result.stderr
    assert not job.get()["spec"].get("suspend")


def held(client: Client, namespace: str, *saved: str) -> Job:
    """Suspended, with the last of these checkpoints as the current one."""
    job = Job(client, namespace, suspend=True)
    for name in saved:
        job.checkpoint(name, conditions=RELEASED, operations=[operation(name, "release", outcome="released")])
    job.jobset(suspend=True, gate=f"held/{saved[-1]}")
    return job


def test_resume_from_an_older_checkpoint_waits_for_the_controller_to_take_it(
    stasis, client: Client, namespace: str
) -> None:
    job = held(client, namespace, "gpt-1", "gpt-2")
    with meanwhile(
        lambda: annotation(job.get(), names.FROM) == "gpt-1/gpt-2",
        lambda: job.jobset(suspend=True, gate="held/gpt-1"),
    ):
        assert stasis("resume", "gpt", "--from", "gpt-1").exit_code == 0
    assert not job.get()["spec"]["suspend"]
    assert annotation(job.get(), names.FROM) == ""


def test_a_checkpoint_that_the_controller_refuses_is_not_resumed_from(stasis, client: Client, namespace: str) -> None:
    job = held(client, namespace, "gpt-1", "gpt-2")
    with meanwhile(
        lambda: annotation(job.get(), names.FROM) != "",
        lambda: job.event("refused", "CheckpointRefused", "its repository is gone"),
    ):
        result = stasis("resume", "gpt", "--from", "gpt-1")
    assert (result.exit_code, "its repository is gone" in result.stderr) == (3, True)
    assert job.get()["spec"]["suspend"] is True


def test_resume_waits_for_the_restore_or_tells_why_it_failed(stasis, client: Client, namespace: str) -> None:
    job = held(client, namespace, "gpt-1")
    message = "rank 1: /dev/shm is too small"
    with meanwhile(
        lambda: not job.get()["spec"]["suspend"],
        lambda: job.status("gpt-1", *RELEASED, condition("Restored", "False", "RestoreFailed", message), restores=1),
    ):
        result = stasis("resume", "gpt", "--wait", "--timeout", "20s")
    assert (result.exit_code, message in result.stderr) == (7, True)
    uid = json.loads(stasis("inspect", "gpt-1", "-o", "json").stdout)["metadata"]["uid"]
    with meanwhile(
        lambda: job.status("gpt-1", *RELEASED, condition("Restored"), restores=2),
        lambda: job.jobset(suspend=False),
        lambda: job.pods(**{names.CHECKPOINT_UID: uid, names.RESTORE: "3"}),
    ):
        result = stasis("resume", "gpt", "--wait", "--timeout", "20s")
    assert result.stdout == "trainjob/gpt: running, restored from gpt-1\n"


def test_checkpoint_makes_the_next_one_in_the_user_s_name(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace)
    job.pods()
    job.checkpoint("gpt-4", conditions=RELEASED)
    with meanwhile(
        lambda: any(item["metadata"]["name"] == "gpt-5" for item in client.list(Checkpoints, namespace=namespace)),
        lambda: job.status("gpt-5", condition("Complete"), condition("Durable")),
    ):
        assert stasis("checkpoint", "gpt", "--wait", "--timeout", "20s").stdout == "trainjob/gpt: saved as gpt-5\n"
    made = client.get(Checkpoints, "gpt-5", namespace=namespace)
    assert made["spec"] == {"trainJob": {"name": "gpt", "uid": job.uid}, "kind": "Checkpoint", "requestedBy": "admin"}
    assert label(made, names.TRAINJOB_UID_LABEL) == job.uid


def test_check_shows_what_stands_against_a_checkpoint(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace)
    finding = {"cause": "userfaultfd", "remedy": "none", "pid": 7, "comm": "python3", "where": "fd 3"}
    ranks = [
        {"rank": 0, "pod": "p0", "node": "a", "findings": [finding]},
        {"rank": 1, "pod": "p1", "node": "b", "findings": []},
    ]

    def answer() -> object:
        nonce = annotation(job.get(), names.CHECK)
        if not nonce:
            return False
        notes = {names.FINDINGS: json.dumps({"ranks": ranks, "error": ""})}
        return job.event(f"gpt.check-{nonce}", "CheckFound", "found", **notes)

    with meanwhile(answer):
        result = stasis("check", "gpt")
    assert result.exit_code == 3
    assert "process 7 (python3), fd 3: userfaultfd" in result.stdout
    assert "ok      rank 1" in result.stdout
    assert annotation(job.get(), names.CHECK) == ""
    silent = stasis("check", "gpt", "--timeout", "0.3")
    assert (silent.exit_code, "kubectl stasis doctor" in silent.stderr) == (11, True)


def test_cancel_takes_back_what_is_under_way(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace)
    job.pods()
    assert stasis("cancel", "gpt").exit_code == 2  # nothing is
    job.checkpoint("gpt-1", kind="Checkpoint", operations=[operation("o", "continue")])
    assert stasis("cancel", "gpt").exit_code == 0
    assert not list(client.list(Checkpoints, namespace=namespace))
    assert stasis("suspend", "gpt").exit_code == 0
    assert stasis("cancel", "gpt").exit_code == 0
    assert not job.get()["spec"]["suspend"]


def test_fork_makes_a_suspended_job_from_the_checkpoint_and_resumes_it(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace)
    job.checkpoint("gpt-1", conditions=RELEASED)
    child = Job.__new__(Job)
    child.client, child.namespace, child.name = client, namespace, "child"

    def made() -> bool:
        found = [item for item in client.list(TrainJobs, namespace=namespace) if item["metadata"]["name"] == "child"]
        if not found:
            return False
        assert found[0]["spec"]["suspend"] is True
        assert found[0]["spec"]["trainer"] == job.get()["spec"]["trainer"]
        assert (annotation(found[0], names.FROM), label(found[0], names.POLICY_LABEL)) == ("gpt-1", "default")
        return True

    from tests.kube.objects import jobset

    with meanwhile(
        made,
        lambda: client.create(jobset("child", namespace, suspend=True)),
        lambda: child.jobset(suspend=True, gate="held/child-1"),
    ):
        result = stasis("fork", "child", "--from", "gpt-1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not child.get()["spec"]["suspend"]
    assert "is there already" in stasis("fork", "gpt", "--from", "gpt-1").stderr


def test_ls_counts_the_namespace_s_bytes_and_inspect_tells_all(stasis, client: Client, namespace: str) -> None:
    job = Job(client, namespace)
    job.checkpoint("gpt-1", conditions=RELEASED, storedBytes=3 << 20, worldSize=2, frozenSeconds="0.42")
    job.checkpoint("gpt-2", conditions=[condition("Failed", reason="NoSpace", message="full")])
    listed = stasis("ls").stdout
    assert "2 checkpoints" in listed
    assert "3.0 MiB as each stands alone" in listed
    rows = json.loads(stasis("ls", "gpt", "-o", "json").stdout)
    assert [(row["name"], row["state"], row["storedBytes"]) for row in rows] == [
        ("gpt-1", "durable", 3 << 20),
        ("gpt-2", "failed", 0),
    ]
    assert "NoSpace full" in stasis("inspect", "gpt-2").stdout
    assert stasis("inspect", "gpt-9").exit_code == 8


@pytest.mark.registry
def test_import_then_verify(stasis, client: Client, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    registry = Registry(tmp_path, tmp_path / "root").start()
    try:
        reference = f"{registry.host}/old/cluster:kept"
        with open_repository(reference) as repository:
            writer = RankWriter(repository, uid=CONFIG.uid, rank=CONFIG.rank)
            writer.put("criu/pages-1.img", bytes(range(256)) * 64)
            publish(repository, "kept", CONFIG.uid, [writer.finish(CONFIG.to_dict()).manifest], {})
        assert "name it by --job" in stasis("import", reference).stderr
        result = stasis("import", reference, "--job", "gpt")
        assert result.exit_code == 0, result.stderr or result.exception
        made = client.get(Checkpoints, "gpt-import-1", namespace=namespace)
        (record, *_) = made["status"]["operations"][0]["records"]
        commit = Record.from_dict(json.loads(record["record"]))
        assert (record["key"], commit.verdict) == (f"{CONFIG.uid}/decision", Verdict.COMMIT)
        assert commit.manifests == {rank["rank"]: rank["manifest"] for rank in made["status"]["ranks"]}
        assert made["status"]["worldSize"] == CONFIG.world_size
        assert stasis("verify", "gpt-import-1").exit_code == 0
    finally:
        registry.stop()
    unreachable = stasis("verify", "gpt-import-1")
    assert unreachable.exit_code == 8
    assert "exec deploy/stasis-controller -- python3 -m stasis verify" in unreachable.stderr


def test_doctor_names_what_is_lacking(stasis) -> None:
    result = stasis("doctor", "-o", "json")
    found = {item["name"]: item for item in json.loads(result.stdout)["found"]}
    assert result.exit_code == 4
    assert found["trainjobcheckpoints.stasis.dev"]["status"] == "ok"
    assert found["controller"]["status"] == "lack"
    assert "helm install" in found["controller"]["remedy"]


def test_a_kubeconfig_that_leads_nowhere_is_said_so(stasis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = stasis("ls")
    assert (result.exit_code, "there is no kubeconfig at" in result.stderr) == (2, True)


def test_a_cluster_without_our_kinds_is_told_from_an_object_that_is_not_there(client: Client, namespace: str) -> None:
    unknown = create_namespaced_resource("nobody.example.com", "v1", "Nothing", "nothings")
    for look in (lambda: list(client.list(unknown, namespace=namespace)), lambda: client.get(unknown, "a")):
        with pytest.raises(Unsupported, match="does not know this kind"), in_words("nothing"):
            look()
    with pytest.raises(NotFound), in_words("checkpoint"):
        client.get(Checkpoints, "a", namespace=namespace)
