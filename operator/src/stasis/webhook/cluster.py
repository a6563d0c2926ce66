"""What the webhook asks the API server: labels of namespaces, policies, pull secrets."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lightkube import AsyncClient
from lightkube.resources.core_v1 import Namespace, Secret

from stasis.api.names import DEFAULT_POLICY, POLICY_LABEL
from stasis.api.v1alpha1 import CheckpointPolicy, CheckpointPolicySpec
from stasis.errors import Denied, NotFound
from stasis.kube.client import Policies, translated

T = TypeVar("T")
_ENFORCE = "pod-security.kubernetes.io/enforce"
_FRESH = 5.0  # seconds; a gang's pods come together


class Cluster:
    """Answers are kept for a few seconds. Errors of the API server pass: Denied, Unavailable."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._known: dict[tuple[str, ...], tuple[float, Any]] = {}

    async def policy_of_namespace(self, namespace: str) -> str:
        """The namespace's label; empty where it has none."""
        return (await self._labels(namespace)).get(POLICY_LABEL, "")

    async def forbids_hooks_to_the_host(self, namespace: str) -> bool:
        """Whether Pod Security lets no pod have a hook that asks an address of its own choice."""
        return (await self._labels(namespace)).get(_ENFORCE, "privileged") != "privileged"

    async def _labels(self, namespace: str) -> dict[str, str]:
        async def ask() -> dict[str, str]:
            found = await self._client.get(Namespace, namespace)
            return dict((found.metadata.labels if found.metadata else None) or {})

        with translated(f"namespace {namespace}"):
            return await self._remembered(("namespace", namespace), ask)

    async def policy(self, namespace: str, name: str) -> CheckpointPolicySpec | None:
        """None where there is no such policy; `default` needs no object."""

        async def ask() -> CheckpointPolicySpec | None:
            try:
                with translated(f"CheckpointPolicy {namespace}/{name}"):
                    found = await self._client.get(Policies, name, namespace=namespace)
            except NotFound:
                return CheckpointPolicySpec() if name == DEFAULT_POLICY else None
            return CheckpointPolicy.from_dict(dict(found)).spec

        return await self._remembered(("policy", namespace, name), ask)

    async def docker_config(self, namespace: str, secret: str) -> dict[str, Any]:
        """The content of a pull secret; empty where there is none that can be used, as kubelet takes it."""
        try:
            with translated(f"Secret {namespace}/{secret}"):
                found = await self._client.get(Secret, secret, namespace=namespace)
        except (NotFound, Denied):
            return {}
        data = found.data or {}
        try:
            if text := data.get(".dockerconfigjson"):
                config = json.loads(base64.b64decode(text))
            elif text := data.get(".dockercfg"):
                config = {"auths": json.loads(base64.b64decode(text))}
            else:
                return {}
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    async def _remembered(self, key: tuple[str, ...], ask: Callable[[], Awaitable[T]]) -> T:
        now = asyncio.get_running_loop().time()
        at, value = self._known.get(key, (0.0, None))
        if now - at > _FRESH:
            value = await ask()
            self._known = {k: v for k, v in self._known.items() if now - v[0] <= _FRESH} | {key: (now, value)}
        return value  # type: ignore[no-any-return]
