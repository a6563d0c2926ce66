"""Backends that remember how they were made, so that they can be made again."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c

from stasis_trainer import sockets
from stasis_trainer.gate import GATE
from stasis_trainer.store import unjournaled

# Of distributed_c10d: the names under which it finds the classes that it makes groups of.
NAMES = tuple(name for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(c, name))


class Remembered:
    """Mixed into a backend's class."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __init__(self, store: Any, *arguments: Any, **options: Any) -> None:
        self.made_with = (store, arguments, options)
        with sockets.opening(), unjournaled(), GATE.bypass():
            super().__init__(store, *arguments, **options)  # type: ignore[call-arg]


REMEMBERED = {name: type(f"Remembered{name}", (Remembered, getattr(c, name)), {}) for name in NAMES}


LASTING = ("_timeout", "global_ranks_in_group", "group_name")  # of a backend's options, set after it was made


def lasting(backend: Any) -> dict[str, Any]:
    found = {}
    for name in LASTING:
        with contextlib.suppress(AttributeError, RuntimeError):
            found[name] = getattr(backend.options, name)
    return found


def again(old: tuple[Any, Any, dict[str, Any]], prefix: str, timeout: timedelta) -> Any:
    """Another one of this class, made with the same, over the same store.

    Peers that do not come are waited for no longer than `timeout`.
    """
    backend_class, (store, arguments, options), kept = old
    options = dict(options)
    if "timeout" in options:
        options["timeout"] = timeout
    if arguments and hasattr(arguments[-1], "split_from"):
        arguments[-1].split_from = None
    backend = backend_class(c.PrefixStore(prefix, store), *arguments, **options)
    backend.made_with = (store, arguments, options)
    for name, value in kept.items():
        if name == "_timeout":
            backend._set_default_timeout(value)
        else:
            setattr(backend.options, name, value)
    backend._set_sequence_number_for_group()
    return backend
