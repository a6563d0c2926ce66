"""The work queue: nothing is forgotten, one worker a key, and what fails comes again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stasis.kube import queue
from stasis.kube.queue import WorkQueue


def run(work: Callable[[str], Awaitable[float | None]], story: Callable[[WorkQueue[str]], Awaitable[None]]) -> None:
    async def tell() -> None:
        made = WorkQueue(work)
        running = asyncio.create_task(made.run(4))
        await story(made)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(tell(), 20))


async def until(seen: Callable[[], bool]) -> None:
    while not seen():
        await asyncio.sleep(0.005)


def test_a_key_is_worked_on_once_however_often_it_is_added_and_again_if_it_comes_meanwhile() -> None:
    done: list[str] = []
    busy: set[str] = set()
    go_on = asyncio.Event()

    async def work(key: str) -> None:
        assert key not in busy
        busy.add(key)
        await go_on.wait()
        busy.discard(key)
        done.append(key)

    async def story(made: WorkQueue[str]) -> None:
        for _ in range(3):
            made.add("a")
            made.add("b")
        await until(lambda: busy == {"a", "b"})
        made.add("a")
        made.add("a")
        go_on.set()
        await until(lambda: len(done) == 3)
        await asyncio.sleep(0.05)
        assert sorted(done) == ["a", "a", "b"]

    run(work, story)


def test_what_fails_comes_again_and_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FIRST_RETRY", 0.001)
    monkeypatch.setattr(queue, "LAST_RETRY", 0.004)
    tries: list[str] = []
    waits: list[float] = []

    async def work(key: str) -> None:
        tries.append(key)
        if len(tries) < 5:
            raise ValueError("not yet")

    async def story(made: WorkQueue[str]) -> None:
        later = made.add_later

        def noted(key: str, seconds: float) -> None:
            waits.append(seconds)
            later(key, seconds)

        monkeypatch.setattr(made, "add_later", noted)
        made.add("a")
        await until(lambda: len(tries) == 5)

    run(work, story)
    assert waits == [0.001, 0.002, 0.004, 0.004]


def test_a_key_that_is_to_be_looked_at_later_comes_sooner_if_something_happens() -> None:
    done: list[str] = []

    async def work(key: str) -> float | None:
        done.append(key)
        return 30.0 if len(done) == 1 else None

    async def story(made: WorkQueue[str]) -> None:
        made.add("a")
        await until(lambda: len(done) == 1)
        made.add("a")
        await until(lambda: len(done) == 2)

    run(work, story)


def test_what_was_not_done_is_still_there_for_the_next_run() -> None:
    done: list[str] = []

    async def work(key: str) -> None:
        if not done:
            done.append("stopped")
            await asyncio.Event().wait()
        done.append(key)

    async def tell() -> None:
        made = WorkQueue(work)
        made.add("a")
        for _ in range(2):
            running = asyncio.create_task(made.run(1))
            await asyncio.sleep(0.05)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(tell())
    assert done == ["stopped", "a"]
