"""What Prometheus is told of a node's agent. docs/metrics.md lists the names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.steps = Histogram(
            "stasis_agent_step_seconds",
            "Time that a step took on a rank.",
            ["step"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.failures = Counter(
            "stasis_agent_step_failures_total", "Steps that failed.", ["step", "reason"], registry=registry
        )
        self.stored = Counter("stasis_agent_stored_bytes_total", "Bytes of ranks that were stored.", registry=registry)
        self.members = Gauge(
            "stasis_agent_members", "Ranks that take part in an operation.", ["state"], registry=registry
        )
        self.frozen = Gauge("stasis_agent_frozen_trees", "Ranks that a guardian watches.", registry=registry)
        self.prestop = Counter("stasis_agent_prestop_total", "Answers to preStop hooks.", ["answer"], registry=registry)
        self.connections = Gauge(
            "stasis_agent_controller_connections", "Connections of controllers.", registry=registry
        )
        self.certificate = Gauge(
            "stasis_agent_certificate_expiry_timestamp_seconds", "When our certificate ends.", registry=registry
        )
