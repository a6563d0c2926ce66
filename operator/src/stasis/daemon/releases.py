"""When released trees are killed: when kubelet says that their pods end.

Not earlier: kubelet would take the end for the trainer's own, and with restartPolicy OnFailure start it from zero. Not
much later: a frozen program does not react to SIGTERM, and the pod would wait for the end of its grace period. So the
preStop hook of each prepared pod asks here, and is answered when the tree is gone. Anybody may ask: it counts only
where the API shows that the pod ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from stasis.agent.node import Pod
from stasis.daemon.pods import Pods
from stasis.errors import StasisError

log = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks at a pod whose tree is to be killed
RELEASED = "released"
UNASKED = 5.0  # seconds after which a pod's end counts though no hook has asked: it asked an agent before this one


@dataclass
class _Released:
    pod: Pod
    container_id: str
    kill: Callable[[], None]
    ends_since: float | None = None  # seconds of time.monotonic
    under_way: bool = False
    waiting: list[Future[str]] = field(default_factory=list)


class Releases:
    """The released trees of this node that live on until their pods end."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._held: dict[str, _Released] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="releases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hold(self, key: str, pod: Pod, container_id: str, kill: Callable[[], None]) -> None:
        """Call `kill` once the pod ends. Of two calls for one tree the later counts."""
        with self._lock:
            released = self._held.setdefault(key, _Released(pod, container_id, kill))
            released.kill = kill
            released.under_way = False
        self._bell.set()

    def asked(self, key: str) -> Future[str]:
        """The hook of this tree's pod asks; the answer comes when the tree is gone, or the pod turns out to live on."""
        future: Future[str] = Future()
        with self._lock:
            released = self._held.get(key)
            if released is None:
                future.set_result("nothing to wait for")
            else:
                released.waiting.append(future)
        self._bell.set()
        return future

    def done(self, key: str) -> None:
        """The tree is gone, or nobody's concern any more. Idempotent."""
        with self._lock:
            released = self._held.pop(key, None)
        _answer(released.waiting if released else (), RELEASED)

    def holds(self, key: str) -> bool:
        with self._lock:
            return key in self._held

    def close(self) -> None:
        self._stopped = True
        self._bell.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._bell.clear()
            with self._lock:
                looked_at = [(key, held) for key, held in self._held.items() if not held.under_way]
            for key, held in looked_at:
                self._look(key, held)
            self._bell.wait(POLL if looked_at else None)

    def _look(self, key: str, held: _Released) -> None:
        with self._lock:
            asked, held.waiting = held.waiting, []  # who asks from now on may know of an end that is not seen here
        try:
            state = self._pods.look(held.pod)
        except StasisError as error:
            log.warning("whether pod %s/%s ends is not known: %s", held.pod.namespace, held.pod.name, error)
            with self._lock:
                held.waiting += asked
            return
        now = time.monotonic()
        with self._lock:
            if self._held.get(key) is not held:
                _answer(asked, RELEASED)
                return
            if state is not None and held.container_id not in state.ended:
                if not state.terminating:
                    held.ends_since = None
                    _answer(asked, "the pod does not end")
                    return
                if held.ends_since is None:
                    held.ends_since = now
                if not asked and now < held.ends_since + UNASKED:
                    return
            held.waiting += asked
            held.under_way = True
            kill = held.kill
        kill()


def _answer(waiting: Iterable[Future[str]], text: str) -> None:
    for future in waiting:
        if future.set_running_or_notify_cancel():  # kubelet may have hung up
            future.set_result(text)
