"""Changes torch.distributed right after its import, where its version is one that was tested."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlparse

from stasis_trainer import channels, control, versions
from stasis_trainer.gate import GATE


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                apply(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    sys.meta_path.insert(0, Finder())


def apply(distributed: ModuleType) -> None:
    torch: Any = sys.modules["torch"]
    version = str(torch.__version__)
    GATE.rank = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None
    why = None if not distributed.is_available() else versions.refusal(version)
    if why:
        GATE.refuse(why)
        print(f"stasis: collectives are left untouched: {why}", file=sys.stderr)
        control.start(version, None)
        return
    from stasis_trainer import groups

    _patch()
    control.start(version, groups)


def _patch() -> None:
    from stasis_trainer import store

    c10d = sys.modules["torch.distributed.distributed_c10d"]
    _replace(c10d, "_new_process_group_helper", _with_handles)
    _replace(c10d, "_new_group_with_tag", _counted_creation)
    _replace(c10d, "init_process_group", _counted_init)
    _replace(c10d, "destroy_process_group", _counted_destroy)
    for name in ("split_group", "shrink_group", "_abort_process_group"):
        if hasattr(c10d, name):
            _replace(c10d, name, _refused)
    _replace_everywhere(store.TCPStore, store.HandleStore)


def _replace(module: Any, name: str, wrap: Callable[[Any, Any], Any]) -> None:
    original = getattr(module, name)
    replacement = functools.wraps(original)(wrap(module, original))
    _replace_everywhere(original, replacement)


def _replace_everywhere(original: Any, replacement: Any) -> None:
    """Also where torch's own modules have imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and module:
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, replacement)


def _with_handles(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Swap the classes only while torch makes a group: schemas of custom operators name torch's own.

    Two threads may make groups at once, and wait for other ranks while they do.
    """
    from stasis_trainer import backends
    from stasis_trainer.handle import HandleGroup

    swapped: dict[str, Any] = {"ProcessGroup": HandleGroup, **backends.REMEMBERED}
    originals = {name: getattr(c10d, name) for name in swapped if hasattr(c10d, name)}
    lock, users = threading.Lock(), [0]

    def count(change: int, classes: dict[str, Any], when: int) -> None:
        with lock:
            users[0] += change
            if users[0] == when:
                for name in originals:
                    setattr(c10d, name, classes[name])

    def replacement(*arguments: Any, **options: Any) -> Any:
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            GATE.refuse("TORCH_DISTRIBUTED_DEBUG=DETAIL")
        count(+1, swapped, 1)
        try:
            return original(*arguments, **options)
        finally:
            count(-1, originals, 0)

    return replacement


def _counted_creation(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def replacement(*arguments: Any, **options: Any) -> Any:
        if GATE.bypassed:
            return original(*arguments, **options)
        given = signature.bind(*arguments, **options).arguments
        ranks = given.get("ranks")
        alone = sorted(ranks) if ranks and given.get("use_local_synchronization") else None
        if alone and c10d.get_rank() not in alone:
            return original(*arguments, **options)
        with GATE.operation(channels.creation(alone), alone or range(c10d.get_world_size())):
            return original(*arguments, **options)

    return replacement


def _counted_init(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    from stasis_trainer import handle

    signature = inspect.signature(original)

    def number(given: dict[str, Any], name: str) -> int | None:
        value = given.get(name, -1)
        if value in (-1, None):
            query = parse_qs(urlparse(given.get("init_method") or "").query)
            value = query[name][0] if name in query else os.environ.get(name.upper(), "")
        return int(value) if str(value).isdigit() else None

    def replacement(*arguments: Any, **options: Any) -> Any:
        control.ensure_started()
        given = signature.bind(*arguments, **options).arguments
        rank = number(given, "rank")
        GATE.rank = GATE.rank if rank is None else rank
        with GATE.operation(channels.INIT, range(number(given, "world_size") or 0)):
            handle.worlds[0] += 1
            result = original(*arguments, **options)
        GATE.rank = c10d.get_rank()
        return result

    return replacement


def _counted_destroy(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A group that is gone in one rank cannot be rebuilt in others, so they come to its end before a cut."""

    def replacement(group: Any = None) -> Any:
        world = group is None or group is c10d.GroupMember.WORLD
        ending = [handle for handle in (list(c10d._world.pg_map) if world else [group]) if hasattr(handle, "destroyed")]
        main = c10d.GroupMember.WORLD if world else group
        if main not in ending or GATE.bypassed:
            return original(group)
        main._identify()
        with GATE.operation(main._channel, main._ranks):
            result = original(group)
            for handle in ending:
                handle.destroyed = True
        return result

    return replacement


def _refused(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*arguments: Any, **options: Any) -> Any:
        GATE.refuse(original.__name__)
        return original(*arguments, **options)

    return replacement
