"""Clients of the API server, and the resources that we use. Their objects are dicts, as the API has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from lightkube import ApiError, AsyncClient, Client, KubeConfig
from lightkube.config.kubeconfig import SingleConfig
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    create_api_info,
    create_namespaced_resource,
)

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicy
from stasis.api.v1alpha1.trainjobcheckpoint import TrainJobCheckpoint
from stasis.errors import Denied, NotFound, StasisError, Unavailable, UsageError

TrainJobs = create_namespaced_resource("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs")
JobSets = create_namespaced_resource("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets")
Checkpoints = create_namespaced_resource(names.GROUP, names.VERSION, TrainJobCheckpoint.KIND, TrainJobCheckpoint.PLURAL)
Policies = create_namespaced_resource(names.GROUP, names.VERSION, CheckpointPolicy.KIND, CheckpointPolicy.PLURAL)


class Pods(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Pod", "pods")


class Secrets(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Secret", "secrets")


class Events(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Event", "events")


class Leases(GenericNamespacedResource):
    _api_info = create_api_info("coordination.k8s.io", "v1", "Lease", "leases")


class MutatingWebhookConfigurations(GenericGlobalResource):
    _api_info = create_api_info(
        "admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations"
    )


TIMEOUT = httpx2.Timeout(10.0)


def configuration(kubeconfig: Path | None = None) -> SingleConfig:
    """Of the file, else the cluster's that we run in, else of KUBECONFIG or ~/.kube/config. Raises UsageError."""
    config = (KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()).get()
    if config is None:
        raise UsageError("no configuration of a cluster", remedy="set KUBECONFIG")
    return config


def connect(config: SingleConfig) -> Client:
    """For threads; safe for several at once."""
    return Client(config=config, timeout=TIMEOUT, field_manager=names.GROUP)


def connect_async(config: SingleConfig) -> AsyncClient:
    return AsyncClient(config=config, timeout=TIMEOUT, field_manager=names.GROUP)


class Conflict(Unavailable):
    """Somebody else was first: read again, then try again."""


def status_code(error: Exception) -> int:
    """Of the API server's refusal; 0 for anything else."""
    return int(error.status.code or 0) if isinstance(error, ApiError) else 0


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise the API's and the network's errors as ours: NotFound, Denied, Conflict, Unavailable."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise _translate(error, what) from error


def _translate(error: httpx2.HTTPError, what: str) -> StasisError:
    match status_code(error):
        case 404:
            return NotFound(f"{what} is not there")
        case 409:
            return Conflict(f"{what}: {error}")
        case 401 | 403:
            return Denied(f"{what}: {error}")
        case _:
            return Unavailable(f"{what}: {error or type(error).__name__}")


def unless_changed(obj: Any, status: dict[str, Any]) -> dict[str, Any]:
    """A merge patch of these fields of the status; refused as a Conflict if the object is no longer the one given."""
    return {"metadata": {"resourceVersion": meta(obj)["resourceVersion"], "uid": meta(obj)["uid"]}, "status": status}


def meta(obj: Any) -> dict[str, Any]:
    """An object's metadata as a dict."""
    found: dict[str, Any] = obj.get("metadata") or {}
    return found


def annotation(obj: Any, name: str) -> str:
    """Empty where it is absent."""
    return str((meta(obj).get("annotations") or {}).get(name, ""))


def label(obj: Any, name: str) -> str:
    """Empty where it is absent."""
    return str((meta(obj).get("labels") or {}).get(name, ""))


def ready(pod: Any) -> bool:
    """By kubelet's condition."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
