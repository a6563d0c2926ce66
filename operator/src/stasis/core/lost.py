"""Ranks that are lost with their node: which, since when, and how the user is told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from stasis.core.view import Operation, Pod, View


def told(view: View) -> View:
    """As `view`, with what is on nodes that have not been ready for the policy's time counted as lost: nobody will
    hear of it, whether it runs on or not."""
    pods = (replace(pod, lost=True, terminating=True) if _left(view, pod) == 0 else pod for pod in view.pods)
    return replace(view, pods=tuple(pods))


def _left(view: View, pod: Pod) -> float | None:
    """Seconds until it counts as lost; None where its node is ready, or it has ended."""
    if not pod.unready_since or pod.succeeded or pod.failed:
        return None
    return max(0.0, pod.unready_since + view.policy.lost_after - view.now)


def until_lost(view: View) -> float | None:
    """Seconds until the next one of its pods counts as lost; None where none will."""
    left = [left for pod in view.pods if (left := _left(view, pod))]
    return min(left, default=None)


def lost_ranks(operation: Operation, pods: Sequence[Pod]) -> tuple[int, ...]:
    """Ranks whose pods are no more: kubelet has said that nothing of them runs, or their node is lost."""
    there = {pod.uid for pod in pods if not pod.lost}
    return tuple(sorted(rank for rank, uid in operation.pods.items() if uid not in there))


def described(ranks: Sequence[int], pods: Sequence[Pod]) -> str:
    """Ranks that are lost, in words."""
    where = {pod.rank: "its trainer failed" for pod in pods if pod.failed}
    where |= {pod.rank: f"node {pod.node} is not ready" for pod in pods if pod.lost}
    one_by_one = ", ".join(f"rank {rank} ({where.get(rank, 'its pod was deleted')})" for rank in ranks)
    return f"{one_by_one} {'is' if len(ranks) == 1 else 'are'} lost"


def on_silent_nodes(pods: Collection[Pod]) -> str:
    """Pods on nodes that are not ready, in words."""
    return ", ".join(f"pod {pod.name} on node {pod.node}" for pod in pods)
