"""The agent's side of a reader: starts it, asks it, takes its answers for foreign, and kills it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from stasis.agent.reader import data, wire
from stasis.agent.reader.broker import Broker
from stasis.agent.reader.process import Process
from stasis.core.rankconfig import IMAGE_PREFIX, RankConfig
from stasis.errors import RestoreFailed, UsageError
from stasis.store.reference import DIGEST, Reference

SECONDS = 600.0  # the most that a call may take


class Call:
    """One that is under way."""

    def __init__(self, reader: Reader, answer: socket.socket, what: str) -> None:
        self._reader = reader
        self._answer = answer
        self._what = what

    def wait(self) -> dict[str, Any]:
        """Its answer. Raises what the reader raised, in its class; RestoreFailed where the reader is gone, takes too
        long or answers nonsense: it is killed then."""
        with self._answer:
            try:
                answer, _ = wire.receive(self._answer, wire.MAX_ANSWER, seconds=self._reader.seconds)
                if "error" not in answer:
                    return answer
                error = wire.revived(answer["error"])
            except TimeoutError:
                error = self._reader.fail(f"took longer than {self._reader.seconds} s to {self._what}")
            except (EOFError, OSError):
                error = self._reader.fail(f"ended when it was to {self._what}")
            except wire.Nonsense as nonsense:
                error = self._reader.fail(f"gave no answer when it was to {self._what}: {nonsense}")
            raise error


class Reader:
    """Reads one rank's checkpoint in a process without privileges, for any number of threads.

    `repository` is a reference, `manifest` the digest of the rank's. `bundle`: of CRIU. `seconds`: the most that
    a call may take. `process`: one that waits for its order; it is the reader's from now on.
    """

    def __init__(
        self,
        bundle: Path,
        repository: str,
        manifest: str,
        *,
        seconds: float = SECONDS,
        process: Process | None = None,
    ) -> None:
        if not DIGEST.fullmatch(manifest):
            raise UsageError(f"{manifest!r:.100} is no digest of a rank's manifest")
        reference = Reference.parse(repository).repository
        self.seconds = seconds
        self._process = process or Process()
        self._process.control.settimeout(seconds)
        self._sending = threading.Lock()
        Broker(reference, self._process.broker)
        self._send({"repository": str(reference), "manifest": manifest, "bundle": str(bundle)}, [])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    def config(self) -> RankConfig:
        """Opens the rank's manifest. Raises Corrupt, Unsupported, and what the repository raises."""
        config = self._call({"call": "open"}, "open the checkpoint").wait().get("config")
        if not isinstance(config, dict):
            raise self.fail("gave no config")
        return RankConfig.from_dict(config)

    def prepare(self, volumes: Collection[str]) -> data.Described:
        """Read the images and ready them for a container whose mount points `volumes` are not in the checkpoint."""
        call = self._call({"call": "prepare", "volumes": sorted(volumes)}, "read the images")
        try:
            return data.described(call.wait())
        except wire.Nonsense as nonsense:
            raise self.fail(str(nonsense)) from None

    def fetch(self, spool: int | None) -> Call:
        """Have all packs read and checked from now on. `spool`: an open file that keeps them, for a repository that is
        slow to read again; the caller closes its own descriptor when it likes."""
        return self._call({"call": "fetch"}, "read the packs", [] if spool is None else [spool])

    def start(self, name: str, fd: int) -> Call:
        """Have a stream written into a pipe or file, from now on; the caller closes its own `fd` when it likes. That
        who reads the pipe closes it early is no error."""
        return self._call({"call": "serve", "name": name}, f"read {name}", [fd])

    def read(self, name: str, limit: int) -> bytes:
        """A short stream, whole. Raises Corrupt where there is none, RestoreFailed where it is longer."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with open(reading, "rb") as file:
            with open(writing, "wb"):
                call = self.start(name, writing)
            found = file.read(limit + 1)
            if len(found) > limit:
                raise self.fail(f"gave more than {limit} bytes as {name}")
            call.wait()
        return found

    def image(self, name: str, fd: int) -> None:
        """Have an image of CRIU written, and wait for it."""
        self.start(IMAGE_PREFIX + name, fd).wait()

    def fail(self, how: str) -> RestoreFailed:
        """Kill it for what it did; the error to raise."""
        self._process.kill()
        words = self._process.last_words()
        return RestoreFailed(f"the reader of the checkpoint {how}{f' ({words})' if words else ''}")

    def kill(self) -> None:
        """Make the calls that are under way, and all later ones, fail."""
        self._process.kill()

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, message: Mapping[str, Any], what: str, fds: Sequence[int] = ()) -> Call:
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(message, [theirs.fileno(), *fds])
        return Call(self, ours, what)

    def _send(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        try:
            with self._sending:
                wire.send(self._process.control, message, fds)
        except OSError as error:
            raise self.fail(f"cannot be asked: {error}") from error
