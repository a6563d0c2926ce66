"""Objects of a training job, as users and Trainer write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkube import Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.models.rbac_v1 import PolicyRule, RoleRef, Subject
from lightkube.resources.core_v1 import Pod
from lightkube.resources.rbac_authorization_v1 import Role, RoleBinding
from tests.support.apiserver import NAMESPACE

from stasis.api import names
from stasis.kube.client import Checkpoints, JobSets, Policies, TrainJobs


def trainjob(name: str, namespace: str, *, label: str | None = None, **spec: Any) -> Any:
    labels = {} if label is None else {names.POLICY_LABEL: label}
    return TrainJobs(
        metadata={"name": name, "namespace": namespace, "labels": labels},
        spec={"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": 2}, **spec},
    )


def jobset(name: str, namespace: str, *, suspend: bool, label: str | None = "default") -> Any:
    """As Trainer applies it, with an initializer beside the trainer."""

    def job(name: str, step: str, container: str) -> dict[str, Any]:
        pod = {"spec": {"restartPolicy": "Never", "containers": [{"name": container, "image": "i"}]}}
        labels = {"trainer.kubeflow.org/trainjob-ancestor-step": step}
        return {"name": name, "template": {"metadata": {"labels": labels}, "spec": {"template": pod}}}

    return JobSets(
        apiVersion="jobset.x-k8s.io/v1alpha2",
        kind="JobSet",
        metadata={"name": name, "namespace": namespace, "labels": {names.POLICY_LABEL: label} if label else {}},
        spec={
            "suspend": suspend,
            "replicatedJobs": [
                job("dataset-initializer", "dataset-initializer", "dataset-initializer"),
                job("node", "trainer", "node"),
            ],
        },
    )


def policy(name: str, namespace: str, **spec: Any) -> Any:
    return Policies(metadata={"name": name, "namespace": namespace}, spec=spec)


def checkpoint(name: str, namespace: str, **spec: Any) -> Any:
    job = {"name": "gpt", "uid": "0e7d1c2b-0000-4000-8000-000000000000"}
    return Checkpoints(metadata={"name": name, "namespace": namespace}, spec={"trainJob": job, **spec})


def pod(
    name: str,
    namespace: str,
    *,
    label: str | None = "default",
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> Any:
    """As the Job controller makes one for a rank, with a sidecar."""
    node = {"name": "node", "image": "registry.test/torch:1", "command": ["torchrun"], "args": ["train.py", "$(HOME)"]}
    side = {"name": "side", "image": "registry.test/side:1", "command": ["logs"]}
    return Pod.from_dict(
        {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": {names.POLICY_LABEL: label} if label else {},
                "annotations": dict(annotations or {}),
            },
            "spec": {"restartPolicy": "Never", "containers": [node, side], **spec},
        }
    )


def let_read_secret(client: Client, namespace: str, name: str) -> None:
    """The controller, by a Role of the namespace, as the documentation tells its users."""
    about = ObjectMeta(name="stasis", namespace=namespace)
    client.create(Role(metadata=about, rules=[PolicyRule(["get"], [""], resourceNames=[name], resources=["secrets"])]))
    controller = Subject("ServiceAccount", "stasis-controller", namespace=NAMESPACE)
    role = RoleRef("Role", "stasis", apiGroup="rbac.authorization.k8s.io")
    client.create(RoleBinding(role, metadata=about, subjects=[controller]))
