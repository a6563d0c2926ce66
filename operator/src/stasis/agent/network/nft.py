"""nftables inside a network namespace, through libnftables: 0.1 ms a call where `nsenter nft` takes 20 ms.

Imported by the guardian, so the standard library alone. `iif` and `oif` must not be used in rules (`iifname` and
`oifname` instead): libnftables would look the index up in the calling thread's namespace.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from types import TracebackType

from stasis.agent import namespaces
from stasis.agent.descriptors import SELECT_LIMIT
from stasis.core.connections import FourTuple
from stasis.errors import ResourceShort, StasisError, Unsupported


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnftables.so.1")
    except OSError as error:
        raise Unsupported(f"libnftables cannot be loaded: {error}", remedy="install libnftables1") from None
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_free.argtypes = [ctypes.c_void_p]
    library.nft_ctx_free.restype = None
    for function in (library.nft_ctx_buffer_error, library.nft_ctx_buffer_output):
        function.argtypes = [ctypes.c_void_p]
    for function in (library.nft_ctx_get_error_buffer, library.nft_ctx_get_output_buffer):
        function.argtypes = [ctypes.c_void_p]
        function.restype = ctypes.c_char_p
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return library


class Nft:
    """A libnftables context. Its netlink socket is made in the namespace and stays there, whichever thread calls.

    Not safe for two threads at once.
    """

    def __init__(self, netns_fd: int) -> None:
        self._library = _library()
        self._context: int | None = namespaces.call(netns_fd, self._new)
        if not self._context:
            raise StasisError("libnftables makes no context in the network namespace")
        self._library.nft_ctx_buffer_error(self._context)
        self._library.nft_ctx_buffer_output(self._context)

    def _new(self) -> int | None:
        next_one = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.close(next_one)
        if next_one >= SELECT_LIMIT:
            raise ResourceShort(f"libnftables cannot use descriptor {next_one}: the process has too many open")
        context: int | None = self._library.nft_ctx_new(0)
        return context

    def run(self, commands: str) -> str:
        """Run nft commands as one transaction and return what they print. Raises StasisError with nft's own text."""
        status = self._library.nft_run_cmd_from_buffer(self._context, commands.encode())
        output: bytes = self._library.nft_ctx_get_output_buffer(self._context)
        error: bytes = self._library.nft_ctx_get_error_buffer(self._context)
        if status:
            raise StasisError(f"nft: {error.decode(errors='replace').strip()[:2000]}")
        return output.decode()

    def close(self) -> None:
        if self._context:
            self._library.nft_ctx_free(self._context)
            self._context = None

    def __enter__(self) -> Nft:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def run(where: int | Nft, commands: str) -> str:
    """Run nft commands in a context, or in one of their own (`where`: a namespace's descriptor), whose end takes the
    kernel some 10 ms. As Nft.run."""
    if isinstance(where, Nft):
        return where.run(commands)
    with Nft(where) as context:
        return context.run(commands)


def replacing(table: str) -> str:
    """Commands that remove `table` ("inet name"), whether it is there or not; rules for a new one may follow."""
    return f"add table {table}\ndelete table {table}\n"


def table(name: str, *parts: str) -> str:
    return "\n".join((f"table {name} {{", *parts, "}\n"))


def chain(name: str, kind: str, hook: str, priority: int, rules: Iterable[str]) -> str:
    return "\n".join((f"chain {name} {{", f"type {kind} hook {hook} priority {priority}; policy accept;", *rules, "}"))


def set_(name: str, kind: str, elements: Iterable[str]) -> str:
    return _elements(f"set {name}", kind, elements)


def map_(name: str, kind: str, elements: Mapping[str, str]) -> str:
    return _elements(f"map {name}", kind, [f"{key} : {value}" for key, value in elements.items()])


def _elements(head: str, kind: str, elements: Iterable[str]) -> str:
    listed = ", ".join(elements)
    return "\n".join((f"{head} {{", f"type {kind};", f"elements = {{ {listed} }}" if listed else "", "}"))


def four_tuple(c: FourTuple) -> str:
    """As an element of a set of `addr . service . addr . service`: local, then remote."""
    return f"{c.local} . {c.local_port} . {c.remote} . {c.remote_port}"
