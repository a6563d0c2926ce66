"""The reader's own process: it has no privileges when it reads the first byte of a checkpoint.

Started by `client.Reader` as root, it imports all that it needs and opens the repository; then it becomes a user of
its own (a number that no other process has, so that readers cannot reach each other), in no group, without
capabilities or a way to get any, and with bounded memory. Root's files stay out of its reach, also those of the
repository, so it asks the agent for a folder's blobs by their digests (`broker`): that needs no feature of the kernel
as Landlock would, and shows the reader no other file. For a folder it also has an empty root and an empty network; a
registry it talks to itself, the credentials come from the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stasis.agent import privileges
from stasis.agent.criu_images import ImageCodec
from stasis.agent.reader import data, wire
from stasis.agent.reader.broker import Agent, HandedFolder
from stasis.agent.reader.images import Prepared
from stasis.core.rankconfig import IMAGE_PREFIX, RankConfig
from stasis.errors import Corrupt, RestoreFailed
from stasis.store.prefetch import Spool
from stasis.store.reader import RankReader
from stasis.store.reference import Reference

if TYPE_CHECKING:
    from stasis.agent.reader.spooled import SpooledRegistry

FIRST_USER = 0x7F000000  # with the process's id: above what systems, container runtimes and clusters give out
MEMORY = 4 << 30  # bytes of address space
TASKS = 4096  # threads
DESCRIPTORS = 4096
STACK = 1 << 20  # bytes of each thread's


def main() -> None:
    """Descriptor 0 is a pipe that the agent holds open, the arguments are the sockets for its calls and our own."""
    end_with_agent(0)
    control, ours = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    order, _ = wire.receive(control, wire.MAX_REQUEST)
    agent, reference = Agent(ours), Reference.parse(order["repository"])
    codec = ImageCodec(Path(order["bundle"], "images.desc"))
    folder = reference.path
    repository = registry(reference, agent) if folder is None else HandedFolder(folder, agent)
    become_nobody(see_nothing=folder is not None)
    Service(repository, order["manifest"], codec).run(control)


def registry(reference: Reference, agent: Agent) -> SpooledRegistry:
    """Its HTTP client takes a while to import, and a folder needs none."""
    import encodings.idna  # noqa: F401 (the resolver asks for it by name)

    from stasis.agent.reader.spooled import SpooledRegistry

    return SpooledRegistry(reference, credentials=agent.credentials)


def end_with_agent(lifeline: int) -> None:
    """The kernel kills us when the agent is gone: its end of the pipe is closed then, and SIGIO ends who ignores it
    not. (A parent's death signal would come with the end of the thread that started us.)"""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def become_nobody(*, see_nothing: bool) -> None:
    privileges.limit(resource.RLIMIT_CORE, 0)
    privileges.limit(resource.RLIMIT_AS, MEMORY)
    privileges.limit(resource.RLIMIT_NPROC, TASKS)
    privileges.limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    threading.stack_size(STACK)
    privileges.forsake(user=FIRST_USER + os.getpid(), see_nothing=see_nothing)
    os.environ["HOME"] = "/nonexistent"


class Service:
    """Answers the agent's calls, each in a thread of its own."""

    def __init__(self, repository: HandedFolder | SpooledRegistry, manifest: str, codec: ImageCodec) -> None:
        self._repository = repository
        self._manifest = manifest
        self._codec = codec
        self._calls: dict[str, Callable[[Mapping[str, Any], list[int]], dict[str, Any]]] = {
            "open": self._open,
            "prepare": self._prepare,
            "fetch": self._fetch,
            "serve": self._serve,
        }

    def run(self, control: socket.socket) -> None:
        """A call's first descriptor is the socket for its answer. Ends with the agent."""
        while True:
            try:
                call, fds = wire.receive(control, wire.MAX_REQUEST, fds=2)
            except EOFError:
                os._exit(0)
            reply = socket.socket(fileno=fds[0])
            threading.Thread(target=self._answer, args=(call, reply, fds[1:]), daemon=True).start()

    def _answer(self, call: Mapping[str, Any], reply: socket.socket, fds: list[int]) -> None:
        with reply:
            try:
                answer = self._calls[call["call"]](call, fds)
            except MemoryError:
                error = RestoreFailed(f"the checkpoint takes more than the {MEMORY} bytes that its reader may have")
                answer = wire.told(error)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
                # Whatever a parser trips over here lies in the bytes.
                answer = wire.told(Corrupt(f"manifest {self._manifest}: {type(error).__name__}: {error}"))
            except Exception as error:
                answer = wire.told(error)
            finally:
                for fd in fds:
                    os.close(fd)
            with contextlib.suppress(OSError):  # the agent waits no longer
                wire.send(reply, answer)

    def _open(self, call: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        self._reader = RankReader(self._repository, self._manifest)
        return {"config": self._reader.config}

    def _prepare(self, call: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        config = RankConfig.from_dict(self._reader.config)
        self._images = Prepared(self._reader, self._codec, config, call["volumes"])
        packed = int(self._reader.index.packs["size"].sum())
        return data.describe(self._images.names, self._images.tasks(), self._images.bound(), packed)

    def _fetch(self, call: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        """What is read meanwhile comes from the repository, and from the spool when this is through."""
        spool = Spool(fds[0], self._reader.index) if fds else None
        self._reader.prefetch(spool.keep if spool else None)
        if spool and not isinstance(self._repository, HandedFolder):
            self._repository.spool = spool
        return {}

    def _serve(self, call: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        name = call["name"]
        image = name.removeprefix(IMAGE_PREFIX)
        write = self._images.source(image) if image != name else None
        try:
            if write:
                write(fds[0])
            else:
                self._reader.copy_to(name, fds[0])
        except BrokenPipeError:
            pass  # CRIU reads some images in part only; who lays files says itself why it stopped
        return {}
