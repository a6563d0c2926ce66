"""The handle of a TCPStore: it can be closed, and made again elsewhere with the keys that were set through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c

from stasis_trainer import sockets
from stasis_trainer.gate import GATE

FIRST_LOOK, LONGEST_PAUSE = 0.0005, 0.02  # seconds, while a key is waited for
Endpoint = tuple[str, int]
STORES: list[HandleStore] = []
TCPStore = c.TCPStore
_quiet = threading.local()


class unjournaled:
    """What a backend writes to find its peers is of no use to the next one."""

    def __enter__(self) -> None:
        _quiet.depth = getattr(_quiet, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _quiet.depth -= 1


class HandleStore(c.Store):
    """Calls that block become a look and a pause, so that the store may go away in between."""

    def __init__(
        self,
        host_name: str | None = None,
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        *rest: Any,
        **options: Any,
    ) -> None:
        super().__init__()
        names = ("wait_for_workers", "multi_tenant", "master_listen_fd", "use_libuv")
        options |= dict(zip(names, rest))
        options |= {"host_name": host_name, "world_size": world_size, "is_master": is_master, "timeout": timeout}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._timeout = timeout
        self._touched: set[str] = set()
        self._saved: dict[str, bytes] = {}
        with sockets.opening():
            self._inner: Any = TCPStore(**{**self._options, "port": port})
        # Again at the rebuild: all are known by then, and the descriptor is gone.
        self._options["wait_for_workers"] = False
        self._options.pop("master_listen_fd", None)
        self.endpoint: Endpoint = (host_name or "", self._inner.port)
        STORES.append(self)

    @property
    def server(self) -> bool:
        return bool(self._options["is_master"])

    # Teardown: all save, then clients close, then servers

    def save(self) -> None:
        self._saved = {key: self._inner.get(key) for key in self._touched if self._inner.check([key])}

    def close(self) -> None:
        self._inner = None

    def rebuild(self, endpoints: dict[str, list[Any]]) -> None:
        host, port = endpoints.get(f"{self.endpoint[0]}:{self.endpoint[1]}", self.endpoint)
        self._inner = None
        with sockets.opening():
            inner = TCPStore(**{**self._options, "host_name": host, "port": int(port)})
        inner.set_timeout(self._timeout)
        for key, value in self._saved.items():
            inner.set(key, value)
        self._inner = inner

    # What torch and its users ask

    def set(self, key: str, value: Any) -> None:
        self._call(lambda inner: inner.set(key, value), [key])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._call(lambda inner: inner.get(key))  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda inner: inner.add(key, amount), [key])  # type: ignore[no-any-return]

    def append(self, key: str, value: Any) -> None:
        self._call(lambda inner: inner.append(key, value), [key])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._call(lambda inner: inner.compare_set(key, expected, desired), [key])  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda inner: inner.check(keys))  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause = FIRST_LOOK
        while not self.check(keys):
            if time.monotonic() > end:
                raise c._DistStoreError(f"wait timeout after {timeout or self._timeout}, keys: {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def delete_key(self, key: str) -> bool:
        return self._call(lambda inner: inner.delete_key(key))  # type: ignore[no-any-return]

    def num_keys(self) -> int:
        return self._call(lambda inner: inner.num_keys())  # type: ignore[no-any-return]

    def list_keys(self) -> list[str]:
        return self._call(lambda inner: inner.list_keys())  # type: ignore[no-any-return]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._call(lambda inner: inner.multi_get(keys))  # type: ignore[no-any-return]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._call(lambda inner: inner.multi_set(keys, values), keys)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> HandleStore:
        options = {**self._options, "is_master": False, "host_name": self.host, "port": self.port}
        return HandleStore(**options)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._call(lambda inner: inner.set_timeout(timeout))

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    @property
    def host(self) -> str:
        return self._inner.host if self._inner else self.endpoint[0]

    @property
    def port(self) -> int:
        return self._inner.port if self._inner else self.endpoint[1]

    @property
    def libuvBackend(self) -> bool:
        return bool(self._inner.libuvBackend)

    # Not journaled: seen by everyone who waits, gone when the store is

    def queue_push(self, *arguments: Any) -> None:
        self._refused("queue_push", *arguments)

    def queue_pop(self, *arguments: Any) -> Any:
        return self._refused("queue_pop", *arguments)

    def queue_len(self, *arguments: Any) -> Any:
        return self._refused("queue_len", *arguments)

    def barrier(self, *arguments: Any, **options: Any) -> Any:
        return self._refused("barrier", *arguments, **options)

    def _refused(self, name: str, *arguments: Any, **options: Any) -> Any:
        GATE.refuse(f"{name} of a TCPStore")
        with GATE.brief_call():
            inner = self._inner
        return getattr(inner, name)(*arguments, **options)

    def _call(self, ask: Callable[[Any], Any], keys: Iterable[str] = ()) -> Any:
        with GATE.brief_call():
            if not getattr(_quiet, "depth", 0):
                self._touched.update(keys)
            return ask(self._inner)


def covered(store: Any) -> bool:
    """Whether this store, or what it prefixes, is one of ours."""
    while isinstance(store, c.PrefixStore):
        store = store.underlying_store
    return isinstance(store, HandleStore)
