"""Who leads, by a real Lease: one at a time, and each new one with higher epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from lightkube import Client
from tests.support.apiserver import ApiServer

from stasis.kube.client import Leases, configuration, connect_async
from stasis.kube.lease import Lease

pytestmark = pytest.mark.kube


def run(api: ApiServer, namespace: str, story: Callable[[Callable[[str], Lease]], Awaitable[None]]) -> None:
    async def tell() -> None:
        client = connect_async(configuration(api.kubeconfig))
        await story(lambda name: Lease(client, namespace, "lease", name, duration=1.0, renew=0.1, give_up=0.7))

    asyncio.run(asyncio.wait_for(tell(), 30))


def test_the_next_one_leads_when_the_first_is_silent_and_with_higher_epochs(api: ApiServer, namespace: str) -> None:
    async def story(make: Callable[[str], Lease]) -> None:
        first, second = make("first"), make("second")
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(2)
        assert not waiting.done()
        epochs = [first.next_epoch(), first.next_epoch()]
        holding.cancel()
        await waiting
        epochs.append(second.next_epoch())
        assert epochs == sorted(set(epochs))

    run(api, namespace, story)


def test_a_leader_that_gives_the_lease_back_is_followed_at_once(api: ApiServer, namespace: str) -> None:
    async def story(make: Callable[[str], Lease]) -> None:
        first, second = make("first"), make("second")
        await first.acquire()
        await first.release()
        await second.acquire()
        await first.hold()  # ends: it is another's
        assert second.next_epoch() > first.next_epoch()

    run(api, namespace, story)


def test_a_leader_whose_lease_was_taken_or_deleted_leads_no_more_or_anew(
    api: ApiServer, client: Client, namespace: str
) -> None:
    async def story(make: Callable[[str], Lease]) -> None:
        first = make("first")
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        client.delete(Leases, "lease", namespace=namespace)
        await holding

    run(api, namespace, story)
