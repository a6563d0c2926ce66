"""A released tree is killed when its pod ends, whoever asks, and whoever does not wait for the answer."""

from __future__ import annotations

import threading

from stasis.agent.node import Pod
from stasis.daemon.pods import PodState
from stasis.daemon.releases import RELEASED, Releases

POD = Pod("team-a", "gpt-0", "uid-0")


class Api:
    def __init__(self) -> None:
        self.terminating = False
        self.asked = threading.Semaphore(0)
        self.answers = threading.Event()

    def look(self, pod: Pod) -> PodState:
        self.asked.release()
        self.answers.wait(10)
        return PodState(self.terminating, {})


def test_a_hook_that_has_hung_up_keeps_nobody_from_being_released() -> None:
    api, killed = Api(), threading.Event()
    releases = Releases(api)
    releases.start()
    try:
        releases.hold("c.0", POD, "container", killed.set)
        gone = releases.asked("c.0")
        assert api.asked.acquire(timeout=10)
        gone.cancel()  # while the API is asked
        api.answers.set()
        api.terminating = True
        waits = releases.asked("c.0")
        assert killed.wait(10)
        releases.done("c.0")
        assert waits.result(10) == RELEASED
        late = releases.asked("c.0")
        assert late.result(10) == "nothing to wait for"
    finally:
        api.answers.set()
        releases.close()


def test_nor_does_one_that_hangs_up_while_the_tree_is_killed() -> None:
    api, killed = Api(), threading.Event()
    api.answers.set()
    api.terminating = True
    releases = Releases(api)
    releases.start()
    try:
        releases.hold("c.0", POD, "container", killed.set)
        gone, waits = releases.asked("c.0"), releases.asked("c.0")
        assert killed.wait(10)
        gone.cancel()
        releases.done("c.0")
        assert waits.result(10) == RELEASED
    finally:
        releases.close()
