"""What Prometheus is told of the webhook. docs/metrics.md lists the names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.seconds = Histogram(
            "stasis_webhook_request_seconds",
            "Time that an admission took.",
            ["path", "result"],  # result: allowed, denied, error
            registry=registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )
        self.deferred = Counter(
            "stasis_webhook_deferred_total",
            "Suspends of JobSets put back until a checkpoint is done.",
            registry=registry,
        )
        self.unprepared = Counter(
            "stasis_webhook_unprepared_pods_total",
            "Pods of enabled jobs that cannot be checkpointed.",
            registry=registry,
        )
