"""Settings of the webhook, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stasis.errors import UsageError


@dataclass(frozen=True)
class InitSettings:
    """How init comes into pods."""

    image: str
    build: str  # the name of its folder in the pod's volume
    pull_policy: str = ""  # Kubernetes' default where it is empty


@dataclass(frozen=True)
class Settings:
    init: InitSettings
    certificates: Path = Path("/etc/stasis/tls")
    port: int = 9443
    metrics_port: int = 8080
    address: str = ""  # all
    read_pull_secrets: bool = True
    plain_http: tuple[str, ...] = ()  # registries
    calico: bool = False  # ask Calico for a pod's address
    pre_stop: bool = True  # False where Pod Security enforces a profile by its own configuration, not by labels
    log_level: str = "info"

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Raises UsageError."""
        missing = [name for name in ("STASIS_INIT_IMAGE", "STASIS_INIT_BUILD") if not env.get(name)]
        if missing:
            raise UsageError(f"{' and '.join(missing)} must be set", remedy="install by the chart")
        return cls(
            init=InitSettings(
                env["STASIS_INIT_IMAGE"], env["STASIS_INIT_BUILD"], env.get("STASIS_INIT_PULL_POLICY", "")
            ),
            certificates=Path(env.get("STASIS_CERTIFICATES", cls.certificates)),
            port=_number(env, "STASIS_PORT", cls.port),
            metrics_port=_number(env, "STASIS_METRICS_PORT", cls.metrics_port),
            address=env.get("STASIS_ADDRESS", cls.address),
            read_pull_secrets=env.get("STASIS_READ_PULL_SECRETS", "true") == "true",
            plain_http=tuple(filter(None, env.get("STASIS_PLAIN_HTTP_REGISTRIES", "").split(","))),
            calico=env.get("STASIS_CNI", "") == "calico",
            pre_stop=env.get("STASIS_PRE_STOP", "true") == "true",
            log_level=env.get("STASIS_LOG_LEVEL", cls.log_level),
        )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise UsageError(f"{name}={env[name]!r} is no number") from None
