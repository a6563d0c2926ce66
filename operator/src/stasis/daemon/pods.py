"""What the API says of the pods of this node's ranks: whether they end, and how their containers ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightkube import Client
from lightkube.resources.core_v1 import Pod as PodResource

from stasis.agent.node import Pod
from stasis.errors import NotFound, StasisError
from stasis.kube.client import translated

STATUS_SECONDS = 15.0  # in which kubelet tells how a container ended
STATUS_POLL = 0.5


@dataclass(frozen=True)
class PodState:
    """`ended`: id of a container -> its exit status."""

    terminating: bool
    ended: Mapping[str, int]


class Pods(Protocol):
    def look(self, pod: Pod) -> PodState | None:
        """None: it is gone, or another one has its name. Raises StasisError where the API does not say."""
        ...


class ApiPods:
    def __init__(self, client: Client) -> None:
        self._client = client

    def look(self, pod: Pod) -> PodState | None:
        try:
            with translated(f"pod {pod.namespace}/{pod.name}"):
                found = self._client.get(PodResource, pod.name, namespace=pod.namespace)
        except NotFound:
            return None
        metadata = found.metadata
        if metadata is None or metadata.uid != pod.uid:
            return None
        statuses = (found.status and found.status.containerStatuses) or []
        return PodState(metadata.deletionTimestamp is not None, dict(_ended(statuses)))


def _ended(statuses: list[Any]) -> Any:
    for status in statuses:
        for state in (status.lastState, status.state):
            if state is not None and (terminated := state.terminated) is not None and terminated.containerID:
                yield terminated.containerID.rpartition("//")[2], terminated.exitCode


def exit_status(
    pods: Pods, pod: Pod, container_id: str, stop: threading.Event, seconds: float = STATUS_SECONDS
) -> int | None:
    """How a container ended whose tree is gone. None where nobody tells in so many seconds, or the pod is gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = pods.look(pod)
            if state is None or container_id in state.ended:
                return state.ended[container_id] if state else None
        except StasisError:
            pass  # asked again
        if stop.wait(STATUS_POLL):
            return None
    return None
