"""A namespace of the cluster that KUBECONFIG names, as kubectl shows it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from stasis.errors import Unavailable

PODS, CHECKPOINTS = "pods", "trainjobcheckpoints"
TIMEOUT = 120  # seconds for one command


class Namespace:
    """A context manager: the namespace is made, watched, and in the end deleted with all that is in it.

    All raise Unavailable where kubectl does not do what it is told.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._watches: list[_Watch] = []
        self._logs: list[_Log] = []

    def __enter__(self) -> Namespace:
        kubectl("create", "namespace", self.name)
        self._watches = [_Watch(self.name, kind) for kind in (PODS, CHECKPOINTS)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._watches, *self._logs):
            process.close()
        kubectl("delete", "namespace", self.name, "--wait=false")

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        return kubectl("-n", self.name, *arguments, stdin=stdin)

    def create(self, objects: Iterable[Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.run("create", "-f", "-", stdin=json.dumps(listed))

    def pods(self, job: str) -> list[Any]:
        """Those of a TrainJob that are there, the oldest first."""
        return self._labelled(PODS, "jobset.sigs.k8s.io/jobset-name", job)

    def checkpoints(self, job: str) -> list[Any]:
        return self._labelled(CHECKPOINTS, "stasis.dev/trainjob", job)

    def _labelled(self, kind: str, label: str, value: str) -> list[Any]:
        found = [one for one in self._found(kind) if one["metadata"].get("labels", {}).get(label) == value]
        return sorted(found, key=lambda one: str(one["metadata"]["creationTimestamp"]))

    def _found(self, kind: str) -> list[Any]:
        return self._watches[(PODS, CHECKPOINTS).index(kind)].objects()

    def follow(self, pod: str, container: str) -> _Log:
        """The log of a container that has started."""
        log = _Log(["kubectl", "-n", self.name, "logs", "-f", pod, "-c", container])
        self._logs.append(log)
        return log


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """What it prints. Raises Unavailable with what it says."""
    command = ["kubectl", *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT)
    except FileNotFoundError as error:
        raise Unavailable("there is no kubectl", remedy="put kubectl on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"`{' '.join(command[:6])} ...` took more than {TIMEOUT} s") from error
    if done.returncode:
        raise Unavailable(f"`{' '.join(command[:6])} ...`: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class _Process:
    """A program whose output a thread reads as it comes."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._thread = threading.Thread(target=self._read, name=command[-1], daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._take(line)

    def _take(self, line: str) -> None:
        raise NotImplementedError

    def wait(self, timeout: float) -> None:
        """Until its output has ended, for so many seconds at most."""
        self._thread.join(timeout)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._thread.join()


class _Log(_Process):
    def __init__(self, command: Sequence[str]) -> None:
        self.lines: list[str] = []
        super().__init__(command)

    def _take(self, line: str) -> None:
        self.lines.append(line.rstrip("\n"))


class _Watch(_Process):
    """All objects of a kind, kept up to date."""

    def __init__(self, namespace: str, kind: str) -> None:
        self._objects: dict[str, Any] = {}
        super().__init__(["kubectl", "-n", namespace, "get", kind, "--watch", "--output-watch-events", "-o", "json"])

    def _take(self, line: str) -> None:
        event = json.loads(line)
        found = event["object"]
        if event["type"] == "DELETED":
            self._objects.pop(found["metadata"]["uid"], None)
        else:
            self._objects[found["metadata"]["uid"]] = found

    def objects(self) -> list[Any]:
        if self._process.poll() is not None:
            raise Unavailable("kubectl does not watch the cluster any more", remedy="try again")
        return list(self._objects.values())
