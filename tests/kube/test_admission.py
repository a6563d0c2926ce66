"""The real webhook behind a real API server, registered as the chart does it: TrainJobs, JobSets, and what
happens to others while it is down."""

from __future__ import annotations

import json
import ssl
from typing import Any

import pytest
from cryptography import x509
from lightkube import ApiError, Client
from lightkube.types import PatchType
from tests.kube.conftest import Webhook, make_certificate, make_namespace, until
from tests.kube.objects import jobset, pod, trainjob
from tests.support.apiserver import ApiServer

from stasis.api import names
from stasis.core.gate import Held, Resume, Stamp, Suspend
from stasis.kube.client import JobSets, TrainJobs

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("webhook")]

OURS = {
    "manager": names.PATCH_MANAGER,
    "trainingRuntimeSpec": {"template": {"metadata": {"labels": {names.POLICY_LABEL: "default"}}}},
}
STAMP = Stamp("gpt-1", "u1", 1, {0: "10.0.0.7"})


class Trainer:
    """Trainer's way to write a JobSet: it applies the whole of it, by force."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client, self.namespace = client, namespace

    def apply(self, suspend: bool, label: str | None = "default") -> bool:
        wanted = jobset("gpt", self.namespace, suspend=suspend, label=label)
        return bool(self.client.apply(wanted, field_manager="trainer", force=True)["spec"]["suspend"])

    def annotate(self, gate: object) -> bool:
        patch = {"metadata": {"annotations": {names.GATE: str(gate)}}}
        done = self.client.patch(JobSets, "gpt", patch, namespace=self.namespace, patch_type=PatchType.MERGE)
        return bool(done["spec"]["suspend"])

    def templates(self) -> dict[str, Any]:
        found = self.client.get(JobSets, "gpt", namespace=self.namespace)
        jobs = found["spec"]["replicatedJobs"]
        return {job["name"]: job["template"]["spec"]["template"].get("metadata", {}) for job in jobs}

    def gate(self) -> str:
        annotations = self.client.get(JobSets, "gpt", namespace=self.namespace)["metadata"].get("annotations") or {}
        return str(annotations.get(names.GATE, ""))


@pytest.fixture
def trainer(client: Client, namespace: str) -> Trainer:
    return Trainer(client, namespace)


def test_the_label_of_a_job_goes_to_its_jobset_by_a_runtime_patch(client: Client, namespace: str) -> None:
    made = client.create(trainjob("gpt", namespace, label="default", runtimePatches=[{"manager": "user.example/x"}]))
    assert made["spec"]["runtimePatches"] == [{"manager": "user.example/x"}, OURS]


def test_the_label_of_a_namespace_enables_its_jobs_but_for_those_that_switch_it_off(client: Client) -> None:
    namespace = make_namespace(client, **{names.POLICY_LABEL: "default"})
    assert client.create(trainjob("a", namespace))["spec"]["runtimePatches"] == [OURS]
    assert "runtimePatches" not in client.create(trainjob("b", namespace, label=""))["spec"]


def test_other_jobs_are_as_they_were(client: Client, namespace: str) -> None:
    assert "runtimePatches" not in client.create(trainjob("gpt", namespace))["spec"]


def test_a_label_added_later_counts_from_the_next_resume(client: Client, namespace: str) -> None:
    def patch(**fields: Any) -> Any:
        return client.patch(TrainJobs, "gpt", fields, namespace=namespace, patch_type=PatchType.MERGE)

    client.create(trainjob("gpt", namespace))
    assert "runtimePatches" not in patch(metadata={"labels": {names.POLICY_LABEL: "default"}})["spec"]
    assert "runtimePatches" not in patch(spec={"suspend": True})["spec"]
    assert patch(spec={"suspend": False})["spec"]["runtimePatches"] == [OURS]


def test_a_suspend_and_a_resume(trainer: Trainer) -> None:
    trainer.apply(False)
    assert trainer.templates() == {"dataset-initializer": {}, "node": {"labels": {names.POLICY_LABEL: "default"}}}
    assert trainer.apply(True) is False, "not saved yet"
    assert trainer.annotate(Suspend("gpt-1")) is False
    assert trainer.apply(True) is True
    assert trainer.gate() == str(Held("gpt-1"))
    assert trainer.apply(False) is True, "not looked at yet"
    assert trainer.annotate(Resume(STAMP)) is True
    assert trainer.apply(False) is False
    assert trainer.gate() == ""
    node = trainer.templates()["node"]
    assert Stamp.of(node["annotations"]) == STAMP
    assert trainer.apply(False) is False
    assert Stamp.of(trainer.templates()["node"]["annotations"]) == STAMP, "Trainer's next write leaves it"


def test_a_resume_between_release_and_suspend_is_closed_by_the_annotation_alone(trainer: Trainer) -> None:
    trainer.apply(False)
    trainer.apply(True)
    trainer.annotate(Suspend("gpt-1"))
    trainer.apply(False)
    assert trainer.annotate(Held("gpt-1")) is True


def test_a_job_made_suspended_starts_at_once_and_unstamped(trainer: Trainer) -> None:
    assert trainer.apply(True) is True
    assert trainer.apply(False) is False
    assert "annotations" not in trainer.templates()["node"]


def test_a_gate_that_is_none_is_refused(trainer: Trainer) -> None:
    trainer.apply(False)
    with pytest.raises(ApiError, match="is no state of the gate"):
        trainer.annotate("ajar")


def test_a_jobset_that_is_not_of_an_enabled_job_is_suspended_at_once(trainer: Trainer) -> None:
    trainer.apply(False, label=None)
    assert trainer.apply(True, label=None) is True


def test_a_jobset_that_is_being_deleted_is_left_alone(client: Client, trainer: Trainer, namespace: str) -> None:
    trainer.apply(False)
    finalizers: dict[str, Any] = {"metadata": {"finalizers": ["stasis.dev/test"]}}
    client.patch(JobSets, "gpt", finalizers, namespace=namespace, patch_type=PatchType.MERGE)
    client.delete(JobSets, "gpt", namespace=namespace)
    suspended = {"spec": {"suspend": True}}
    done = client.patch(JobSets, "gpt", suspended, namespace=namespace, patch_type=PatchType.MERGE)
    assert done["spec"]["suspend"] is True
    finalizers["metadata"]["finalizers"] = []
    client.patch(JobSets, "gpt", finalizers, namespace=namespace, patch_type=PatchType.MERGE)


def test_metrics_and_logs_tell_what_was_done(client: Client, webhook: Webhook, trainer: Trainer) -> None:
    trainer.apply(False)
    trainer.apply(True)
    client.create(pod("p", trainer.namespace, hostPID=True))
    status, text = webhook.get("/metrics")
    assert status == 200
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found["stasis_webhook_deferred_total"]) >= 1
    assert float(found["stasis_webhook_unprepared_pods_total"]) >= 1
    assert float(found['stasis_webhook_request_seconds_count{path="/pods",result="allowed"}']) >= 1
    lines = [json.loads(line) for line in webhook.log.read_text().splitlines()]
    said = [line for line in lines if line.get("namespace") == trainer.namespace]
    assert any(line.get("deferred") and line["job"] == "gpt" for line in said)


def test_a_new_certificate_is_served_without_a_restart(webhook: Webhook) -> None:
    def serial() -> int:
        pem = ssl.get_server_certificate(("127.0.0.1", webhook.port))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    assert serial() == 1
    key, certificate = ((webhook.certificates / name).read_bytes() for name in ("tls.key", "tls.crt"))
    try:
        make_certificate(webhook.certificates, 2)
        until(lambda: serial() == 2, "the new certificate")
        (webhook.certificates / "tls.crt").write_bytes(b"half a certif")
        assert serial() == 2, "what cannot be used is passed over"
    finally:
        (webhook.certificates / "tls.key").write_bytes(key)
        (webhook.certificates / "tls.crt").write_bytes(certificate)
    until(lambda: serial() == 1, "the certificate of the registration")


def test_a_webhook_that_is_down_delays_enabled_jobs_and_nobody_else(
    client: Client, webhook: Webhook, trainer: Trainer
) -> None:
    trainer.apply(False)
    webhook.kill()
    try:
        client.create(pod("other", trainer.namespace, label=None))
        client.create(trainjob("other", trainer.namespace))
        client.patch(
            JobSets,
            "gpt",
            {"metadata": {"labels": {"a": "b"}}},
            namespace=trainer.namespace,
            patch_type=PatchType.MERGE,
        )
        client.delete(JobSets, "gpt", namespace=trainer.namespace)
        with pytest.raises(ApiError, match="failed calling webhook"):
            client.create(pod("p", trainer.namespace))
        with pytest.raises(ApiError, match="failed calling webhook"):
            trainer.apply(False)
    finally:
        webhook.start()
        until(webhook.ready, "the webhook")
    assert client.create(pod("p", trainer.namespace)).metadata.annotations[names.PREPARED]


def test_without_a_certificate_it_is_alive_but_not_ready(api: ApiServer, tmp_path: Any) -> None:
    webhook = Webhook(api, tmp_path)
    webhook.start()
    try:
        until(lambda: webhook.get("/healthz")[0] == 200, "life")
        assert webhook.get("/readyz") == (503, "no certificate\n")
        make_certificate(webhook.certificates, 1)
        until(webhook.ready, "readiness")
        webhook.process.terminate()
        until(lambda: webhook.get("/readyz") == (503, "stopping\n"), "that nothing more is sent to it")
        assert webhook.process.wait(20) == 0
    finally:
        webhook.kill()
