"""The handle of a process group: what DDP, FSDP and the user hold, while the real group inside it comes and goes."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c

from stasis_trainer import backends, channels, surface
from stasis_trainer.gate import GATE
from stasis_trainer.store import covered
from stasis_trainer.work import HandleWork

c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
HANDLES: weakref.WeakSet[HandleGroup] = weakref.WeakSet()
_order = itertools.count()
worlds = [0]  # how many were made


class HandleGroup(c.ProcessGroup):
    """What is set on it is remembered and set again on the group that is rebuilt."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self.order = next(_order)
        self.destroyed = False
        self._made_with = (store, rank, size)
        self._inner: Any = c.ProcessGroup(store, rank, size)
        self._default_backend: Any = None
        self._device: Any = None
        self._name = self._description = ""
        self._timeout: timedelta | None = None
        self._backends: list[Any] = []  # the last owners of what has the connections
        self._registered: list[tuple[Any, Any, int]] = []  # device, kind, index into _backends
        self._old: list[tuple[Any, Any, dict[str, Any]]] = []
        self._door: HandleBackend | None = None
        self._channel = ""
        self._ranks: list[int] = []
        self._coalesced: int | None = None
        HANDLES.add(self)
        if not covered(store):
            GATE.refuse("a process group over a store other than TCPStore")

    # Set by torch while it makes the group

    def _set_default_backend(self, kind: Any) -> None:
        self._default_backend = kind
        super()._set_default_backend(kind)
        self._inner._set_default_backend(kind)

    def _register_backend(self, device: Any, kind: Any, backend: Any) -> None:
        if not isinstance(backend, backends.Remembered):
            GATE.refuse(f"backend {type(backend).__name__} ({kind})")
        self._inner._register_backend(device, kind, backend)
        if not any(known is backend for known in self._backends):
            self._backends.append(backend)
        index = next(i for i, known in enumerate(self._backends) if known is backend)
        self._registered.append((device, kind, index))
        if backends_from_python():
            # C++ that asks the handle for its backend gets a door to the same gate.
            self._door = self._door or HandleBackend(self)
            super()._register_backend(device, kind, self._door)

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self._inner._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        self._inner._set_group_desc(description)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        with GATE.brief_call():
            self._inner.set_timeout(timeout)

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)

    @property
    def _device_types(self) -> Any:
        with GATE.brief_call():
            return self._inner._device_types

    @property
    def bound_device_id(self) -> Any:
        return self._device

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        self._device = self._inner.bound_device_id = device

    def rank(self) -> int:
        return self._made_with[1]

    def size(self) -> int:
        return self._made_with[2]

    # The names under which C++ asks

    def getBackendName(self) -> str:
        return "stasis"  # DDP's logger takes what calls itself gloo for torch's own class, and casts

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._set_group_name(name)

    def setGroupDesc(self, description: str) -> None:
        self._set_group_desc(description)

    def getSequenceNumberForGroup(self) -> int:
        with GATE.brief_call():
            return int(self._inner._get_sequence_number_for_group())

    # Operations

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        return self._point_to_point("send", tensors, destination, tag, (self.rank(), destination))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._point_to_point("recv", tensors, source, tag, (source, self.rank()))

    def monitored_barrier(self, *arguments: Any, **options: Any) -> Any:
        if GATE.bypassed:
            return self._inner.monitored_barrier(*arguments, **options)
        self._identify()
        with GATE.operation(self._channel, self._ranks):
            return self._inner.monitored_barrier(*arguments, **options)

    def _start_coalescing(self, device: Any) -> None:
        """All up to the end is one operation."""
        if not GATE.bypassed:
            self._identify()
            self._coalesced = GATE.enter(self._channel, self._ranks)
        self._inner._start_coalescing(device)

    def _end_coalescing(self, device: Any) -> Any:
        work = self._inner._end_coalescing(device)
        ticket, self._coalesced = self._coalesced, None
        return work if ticket is None else self._begun(ticket, work, False, 2)

    def _identify(self) -> None:
        if not self._channel:
            ranks = c10d._world.pg_group_ranks[self]
            self._ranks = sorted(ranks, key=ranks.get)
            self._channel = channels.group(self._name, worlds[0])

    def _point_to_point(self, name: str, tensors: Any, peer: int, tag: int, pair: tuple[int, int]) -> Any:
        if GATE.bypassed or self._coalesced is not None:
            return getattr(self._inner, name)(tensors, peer, tag)
        self._identify()
        source, destination = (self._ranks[rank] for rank in pair)
        channel = channels.pair(self._channel, source, destination, tag)
        return self._issue(name, (tensors, peer, tag), {}, channel, sorted({source, destination}), True)

    def _collective(self, name: str, arguments: Any, options: Any) -> Any:
        if GATE.bypassed or self._coalesced is not None:
            return getattr(self._inner, name)(*arguments, **options)
        self._identify()
        return self._issue(name, arguments, options, self._channel, self._ranks, False)

    def _issue(self, name: str, arguments: Any, options: Any, channel: str, ranks: list[int], pair: bool) -> Any:
        ticket = GATE.enter(channel, ranks)
        try:
            work = getattr(self._inner, name)(*arguments, **options)
        except BaseException:
            GATE.ended(ticket)
            raise
        return self._begun(ticket, work, pair, 4)

    def _begun(self, ticket: int, work: Any, point_to_point: bool, depth: int) -> Any:
        if work is None:
            GATE.ended(ticket)
            return None
        handle = HandleWork(work, point_to_point)
        GATE.begun(ticket, handle)
        if sys._getframe(depth).f_code.co_filename != c10d.__file__:
            handle.hold_for_caller()  # DDP's reducer, functional collectives
        return handle

    # Teardown and rebuild

    def teardown(self) -> None:
        """Drop the group first: if C++ were the last owner of a backend, its destructor would join threads with the GIL
        held, which they need. The holder of the Python object lets go of it."""
        self._old = [
            (type(backend), getattr(backend, "made_with", None), backends.lasting(backend))
            for backend in self._backends
        ]
        self._inner = None
        while self._backends:
            backend = self._backends.pop()
            if hasattr(c, "ProcessGroupNCCL") and isinstance(backend, c.ProcessGroupNCCL):
                backend.abort()
            del backend

    def rebuild(self, epoch: str, timeout: timedelta) -> None:
        self._inner, self._backends = None, []
        inner = c.ProcessGroup(*self._made_with)
        if self._default_backend is not None:
            inner._set_default_backend(self._default_backend)
        if self._device is not None:
            inner.bound_device_id = self._device
        made = [backends.again(old, f"stasis{epoch}", timeout) for old in self._old]
        for device, kind, index in self._registered:
            inner._register_backend(device, kind, made[index])
        inner._set_group_name(self._name)
        inner._set_group_desc(self._description)
        if self._timeout is not None:
            inner.set_timeout(self._timeout)
        self._inner, self._backends = inner, made

    def connect(self) -> None:
        """As torch does for a group that is bound to a device."""
        if self._device is not None:
            backend = self._inner._get_backend(self._device)
            if backend.supports_splitting:
                backend.eager_connect_single_device(self._device)


class HandleBackend(c.Backend):
    """The way in for C++ code that asks a group for its backend: newer torch has kernels that do."""

    def __init__(self, group: HandleGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)

    @property
    def group(self) -> HandleGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("this process group was destroyed")
        return group

    def getBackendName(self) -> str:
        return "stasis"

    def name(self) -> str:
        return "stasis"


def backends_from_python() -> bool:
    """torch 2.6 neither allows nor needs a Backend written in Python."""
    return hasattr(c.Backend, "allgather_into_tensor_coalesced") or hasattr(c.Backend, "all_gather_single")


def _collective(name: str) -> Callable[..., Any]:
    def method(self: HandleGroup, *arguments: Any, **options: Any) -> Any:
        return self._collective(name, arguments, options)

    return method


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: HandleGroup, *arguments: Any, **options: Any) -> Any:
        with GATE.brief_call():
            return getattr(self._inner, name)(*arguments, **options)

    return method


def _refused(name: str) -> Callable[..., Any]:
    def method(self: HandleGroup, *arguments: Any, **options: Any) -> Any:
        GATE.refuse(f"{name} of a process group")
        with GATE.brief_call():
            inner = self._inner
        return getattr(inner, name)(*arguments, **options)

    return method


def _through_the_door(name: str) -> Callable[..., Any]:
    def method(self: HandleBackend, *arguments: Any, **options: Any) -> Any:
        return getattr(self.group, name)(*arguments, **options)

    return method


def _past_the_gate(name: str) -> Callable[..., Any]:
    """What backends alone have."""

    def method(self: HandleBackend, *arguments: Any, **options: Any) -> Any:
        if name not in surface.FORWARDED:
            GATE.refuse(f"{name} of a backend")
        with GATE.brief_call():
            backend = self.group._backends[0]
        return getattr(backend, name)(*arguments, **options)

    return method


def _complete() -> None:
    for names, make in (
        (surface.COLLECTIVES, _collective),
        (surface.FORWARDED, _forwarded),
        (surface.REFUSED, _refused),
    ):
        for name in names:
            if hasattr(c.ProcessGroup, name):
                setattr(HandleGroup, name, make(name))
            if hasattr(c.Backend, name) and name not in vars(HandleBackend):
                setattr(
                    HandleBackend, name, (_through_the_door if hasattr(c.ProcessGroup, name) else _past_the_gate)(name)
                )
    for name in surface.OWN:
        if callable(getattr(c.Backend, name, None)):
            setattr(HandleBackend, name, _through_the_door(name))


_complete()
