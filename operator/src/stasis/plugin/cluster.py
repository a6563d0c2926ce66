"""The user's cluster: the kubeconfig as kubectl takes it, and errors in the user's words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.resources.authentication_v1 import SelfSubjectReview

from stasis.errors import StasisError, Unsupported, UsageError
from stasis.kube.client import connect, translated

INSTALL = "helm install stasis charts/stasis -n stasis-system --create-namespace"


@dataclass(frozen=True)
class Cluster:
    """A client, and the namespace that commands are about."""

    client: Client
    namespace: str


def open_cluster(context: str | None, namespace: str | None) -> Cluster:
    """Nothing is read of the cluster yet. Raises UsageError where the kubeconfig leads nowhere."""
    config = _configuration(context)
    return Cluster(connect(config), namespace or config.namespace or "default")


def _configuration(context: str | None) -> SingleConfig:
    listed = os.environ.get("KUBECONFIG", "") or str(Path.home() / ".kube" / "config")
    files = [path for path in map(Path, listed.split(os.pathsep)) if path.is_file()]
    try:
        if not files:
            config = KubeConfig.from_service_account().get()  # in a pod
        else:
            configs = [KubeConfig.from_file(path) for path in files]
            wanted = context or next((c.current_context for c in configs if c.current_context), None)
            config = next((c for c in configs if wanted in c.contexts), configs[0]).get(wanted)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        cause = str(error) if files else f"there is no kubeconfig at {listed}"
        raise UsageError(cause, remedy="set KUBECONFIG, or --context to one of `kubectl config get-contexts`") from None
    if config is None:
        raise UsageError(f"{listed} has no current context", remedy="kubectl config use-context NAME")
    return config


@contextmanager
def asked(what: str) -> Iterator[None]:
    """As `translated`; and what the API server finds wrong with a request is the user's to mend."""
    try:
        with translated(what):
            yield
    except StasisError as error:
        cause = error.__cause__
        if _kind_is_unknown(cause):
            raise Unsupported(f"{what}: the cluster does not know this kind of object", remedy=INSTALL) from cause
        if isinstance(cause, ApiError) and cause.status.code in (400, 422):
            raise UsageError(f"{what}: {cause}") from cause
        raise


def _kind_is_unknown(cause: BaseException | None) -> bool:
    """Of an object that is not there the API server says its name; of a kind it says nothing but 404."""
    if isinstance(cause, ApiError):
        return cause.status.code == 404 and not (cause.status.details and cause.status.details.name)
    return isinstance(cause, httpx2.HTTPStatusError) and cause.response.status_code == 404


def user(cluster: Cluster) -> str:
    """As the API server knows us; empty where it does not say."""
    try:
        review: Any = cluster.client.create(SelfSubjectReview())
    except httpx2.HTTPError:
        return ""
    return str(review.status.userInfo.username or "")[:253]
