"""How the controller is set up: options, or the environment (STASIS_REPOSITORY for --repository)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    repository: str  # prefix of where checkpoints go; NAMESPACE/UID of the job is added
    namespace: str  # ours
    identity: str  # in the lease; a random part is added
    agent_port: int
    http_port: int  # health and metrics
    lease_seconds: float
    lease_retry: float
    certificates: Path | None  # a folder with ca.crt, tls.crt, tls.key; None: made and rotated by the leader
    webhook_certificate: str  # managed, external
    kubeconfig: Path | None
