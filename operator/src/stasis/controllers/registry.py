"""Calls to a registry with the credentials that the job's namespace has for it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any, TypeVar

from lightkube import AsyncClient

from stasis.controllers.events import Teller
from stasis.controllers.live import Live
from stasis.errors import Denied, NotFound
from stasis.kube.client import Secrets, translated
from stasis.store import credentials
from stasis.store.reference import Reference

DOCKER_CONFIG = ".dockerconfigjson"

T = TypeVar("T")


class Registry:
    def __init__(self, client: AsyncClient, teller: Teller) -> None:
        self._client = client
        self._teller = teller

    async def call(self, seen: Live, repository: str, call: Callable[..., T], *args: Any) -> T:
        """One of `stored`, with the credentials for as long as it takes."""
        text, where = await self.credentials(seen), Reference.parse(repository)
        if text:
            credentials.hand_over(where.host, where.name, text)
        try:
            return await asyncio.to_thread(call, repository, *args)
        finally:
            if text:
                credentials.withdraw(where.host, where.name)

    async def credentials_or_none(self, seen: Live) -> str:
        """For an operation, which must come to its end: without them it fails where they are needed, and says so."""
        try:
            return await self.credentials(seen)
        except (NotFound, Denied) as error:
            await self._teller.tell(seen.job, error.reason, str(error), warning=True)
            return ""

    async def credentials(self, seen: Live) -> str:
        """Text of the docker config that the policy names, empty where it names none. Raises NotFound, Denied."""
        name = seen.policy.storage.secret_name
        if not name:
            return ""
        with translated(f"secret {seen.key[0]}/{name}"):
            secret = await self._client.get(Secrets, name, namespace=seen.key[0])
        return base64.b64decode((secret.get("data") or {}).get(DOCKER_CONFIG, "")).decode()
