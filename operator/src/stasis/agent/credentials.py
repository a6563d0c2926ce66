"""Credentials as CRIU's images and as /proc have them, for `core.credentials` to compare."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stasis.agent import proctree
from stasis.agent.criu_images import ImageCodec
from stasis.core import seccomp
from stasis.core.credentials import Credentials
from stasis.errors import Corrupt, Unsupported

_DEAD = frozenset({2, 6})  # TASK_DEAD, TASK_ZOMBIE (compel/task-state.h): nothing of theirs runs
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_LIBC.ptrace.restype = ctypes.c_long
_SEIZE, _INTERRUPT, _DETACH, _GET_FILTER = 0x4206, 0x4207, 17, 0x420C
_MAX_INSTRUCTIONS, _INSTRUCTION = 4096, 8
_TSYNC = 1  # SECCOMP_FILTER_FLAG_TSYNC
_MAX_FILTERS = 32  # CRIU itself stops at less


def of_images(codec: ImageCodec, images: Mapping[str, bytes]) -> list[Credentials]:
    """Of every thread of a dump that will run. `images`: name -> content, at least pstree.img, core-*.img and
    seccomp.img where there is one.

    Raises Corrupt where a thread of the tree has no credentials: CRIU would take them from elsewhere.
    """
    filters = _filters(codec, images.get("seccomp.img", b""))
    synced = _synced(codec, images.get("seccomp.img", b""))
    found = []
    for entry in codec.load("pstree.img", _image(images, "pstree.img")).messages:
        leader = _core(codec, images, entry.pid)
        if leader.HasField("tc") and leader.tc.task_state in _DEAD:
            continue
        for thread in {entry.pid, *entry.threads}:
            core = leader if thread == entry.pid else _core(codec, images, thread)
            found.append(_of_core(thread, core, leader, filters, synced))
    return found


def _image(images: Mapping[str, bytes], name: str) -> bytes:
    if name not in images:
        raise Corrupt(f"the checkpoint has no {name}")
    return images[name]


def _core(codec: ImageCodec, images: Mapping[str, bytes], thread: int) -> Any:
    name = f"core-{thread}.img"
    messages = codec.load(name, _image(images, name)).messages
    if len(messages) != 1:
        raise Corrupt(f"{name}: {len(messages)} entries instead of one")
    return messages[0]


def _of_core(
    thread: int, core: Any, leader: Any, filters: Sequence[tuple[bytes, ...]], synced: Collection[int]
) -> Credentials:
    if not core.HasField("thread_core") or not core.thread_core.HasField("creds"):
        raise Corrupt(f"core-{thread}.img: a thread without credentials")
    creds, own = core.thread_core.creds, core.thread_core
    mode, index = seccomp.DISABLED, None
    if own.HasField("seccomp_mode"):
        mode, index = own.seccomp_mode, own.seccomp_filter if own.HasField("seccomp_filter") else None
    elif leader.HasField("tc") and leader.tc.HasField("old_seccomp_mode"):
        mode, index = leader.tc.old_seccomp_mode, leader.tc.old_seccomp_filter
    elif leader.thread_core.HasField("seccomp_filter") and leader.thread_core.seccomp_filter in synced:
        mode, index = leader.thread_core.seccomp_mode, leader.thread_core.seccomp_filter
    if index is not None and index >= len(filters):
        raise Corrupt(f"core-{thread}.img: seccomp filter {index} of {len(filters)}")
    return Credentials(
        thread=thread,
        comm=own.comm or leader.tc.comm,
        uids=(creds.uid, creds.euid, creds.suid, creds.fsuid),
        gids=(creds.gid, creds.egid, creds.sgid, creds.fsgid),
        groups=tuple(creds.groups),
        inheritable=_mask(creds.cap_inh),
        permitted=_mask(creds.cap_prm),
        effective=_mask(creds.cap_eff),
        bounding=_mask(creds.cap_bnd),
        ambient=_mask(creds.cap_amb),
        no_new_privs=bool(creds.no_new_privs),
        seccomp=mode,
        filters=filters[index] if index is not None else (),
        label=creds.lsm_profile,
    )


def _mask(words: Sequence[int]) -> int:
    return sum(word << 32 * place for place, word in enumerate(words))


def _filters(codec: ImageCodec, image: bytes) -> list[tuple[bytes, ...]]:
    """For each filter its chain, the one that was installed first first: CRIU's `prev` names the one installed next."""
    if not image:
        return []
    chains: list[tuple[bytes, ...]] = []
    for entry in codec.load("seccomp.img", image).messages:
        for number, one in enumerate(entry.seccomp_filters):
            if one.HasField("prev") and one.prev >= number:
                raise Corrupt(f"seccomp.img: filter {number} comes after filter {one.prev}")
            before = chains[one.prev] if one.HasField("prev") else ()
            chains.append((bytes(one.filter), *before))
        break  # CRIU reads one entry
    return chains


def _synced(codec: ImageCodec, image: bytes) -> set[int]:
    """The filters that CRIU installs in all threads of a process at once: of threads that have the same ones as their
    leader, the images hold the leader's alone (criu/seccomp.c, try_use_tsync)."""
    entries = codec.load("seccomp.img", image).messages[:1] if image else []
    return {n for entry in entries for n, one in enumerate(entry.seccomp_filters) if one.flags & _TSYNC}


def of_process(pid: int) -> Credentials:
    """Of a placeholder's init. A process under seccomp is stopped for a moment, since the kernel shows its filters to
    a tracer only. ProcessLookupError: it is gone; Unsupported: it is in a user namespace of its own."""
    text = proctree.read(pid, pid, "status")
    if not text:
        raise ProcessLookupError(f"process {pid} is gone")
    if proctree.read(pid, pid, "uid_map") != proctree.read(os.getpid(), os.getpid(), "uid_map"):
        raise Unsupported(
            "the container is in a user namespace of its own, whose ids are not those of the checkpoint",
            remedy="do not set hostUsers: false",
        )
    return _of_status(0, text, proctree.read(pid, pid, "attr/current"), _installed(pid) if _filtered(text) else ())


def of_threads(pids: Iterable[int]) -> list[Credentials]:
    """Of every thread of processes that stand still, as the kernel has them; but for their seccomp filters, which it
    shows to a tracer only."""
    found = []
    for pid in pids:
        for task in proctree.tasks(pid):
            if text := proctree.read(pid, task, "status"):
                found.append(_of_status(task, text, proctree.read(pid, task, "attr/current"), ()))
    return found


def _filtered(text: str) -> bool:
    return f"\nSeccomp:\t{seccomp.FILTER}" in text


def _of_status(thread: int, text: str, label: str, filters: tuple[bytes, ...]) -> Credentials:
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    return Credentials(
        thread=thread,
        comm=status["Name"],
        uids=_ids(status["Uid"]),
        gids=_ids(status["Gid"]),
        groups=_ids(status["Groups"]),
        inheritable=int(status["CapInh"], 16),
        permitted=int(status["CapPrm"], 16),
        effective=int(status["CapEff"], 16),
        bounding=int(status["CapBnd"], 16),
        ambient=int(status["CapAmb"], 16),
        no_new_privs=status["NoNewPrivs"] == "1",
        seccomp=int(status.get("Seccomp", "0")),
        filters=filters,
        label=label.rstrip("\0\n"),
    )


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _installed(pid: int) -> tuple[bytes, ...]:
    filters = []
    with _stopped(pid):
        buffer = ctypes.create_string_buffer(_MAX_INSTRUCTIONS * _INSTRUCTION)
        for index in range(_MAX_FILTERS):  # the one that was installed first is number 0
            count = _LIBC.ptrace(_GET_FILTER, pid, index, ctypes.addressof(buffer))
            if count < 0:
                break
            filters.append(buffer.raw[: count * _INSTRUCTION])
    return tuple(filters)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    _traced(_SEIZE, pid)
    try:
        _traced(_INTERRUPT, pid)
        _, status = os.waitpid(pid, 0x40000000)  # __WALL
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"process {pid} is gone")
        yield
    finally:
        _LIBC.ptrace(_DETACH, pid, None, None)


def _traced(request: int, pid: int) -> None:
    if _LIBC.ptrace(request, pid, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot look at the seccomp filters of process {pid}: {os.strerror(number)}")
