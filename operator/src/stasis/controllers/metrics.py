"""What Prometheus is told of the controller. docs/metrics.md lists the names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.leader = Gauge("stasis_leader", "1 where this process leads.", registry=registry)
        self.queue = Gauge("stasis_queue_length", "TrainJobs that wait to be looked at.", registry=registry)
        self.jobs = Gauge("stasis_trainjobs", "TrainJobs with a policy whose JobSet is there.", registry=registry)
        self.pods = Gauge("stasis_pods", "Pods of ranks of these.", registry=registry)
        self.heard = Gauge("stasis_watch_age_seconds", "Since the watches last told anything.", registry=registry)
        self.operations = Gauge(
            "stasis_operations_led", "Operations that this process leads.", ["kind", "step"], registry=registry
        )
        self.ended = Counter(
            "stasis_operations_total", "Operations that have ended.", ["kind", "outcome"], registry=registry
        )
        self.seconds = Histogram(
            "stasis_operation_seconds",
            "From an operation's beginning to its end.",
            ["kind"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.frozen = Gauge(
            "stasis_frozen_seconds", "For how long ranks stand still.", ["namespace", "trainjob"], registry=registry
        )
        self.deferred = Gauge(
            "stasis_deferred_seconds",
            "For how long a suspend is held back.",
            ["namespace", "trainjob"],
            registry=registry,
        )
        self.not_durable = Gauge(
            "stasis_not_durable_seconds",
            "For how long the last checkpoint is on its nodes only.",
            ["namespace", "trainjob"],
            registry=registry,
        )
        self.collection_failures = Counter(
            "stasis_collection_failures_total", "Checkpoints that could not be removed.", registry=registry
        )
        self.certificate = Gauge(
            "stasis_certificate_expiry_timestamp_seconds", "When our certificate ends.", registry=registry
        )
