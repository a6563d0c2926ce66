"""A gang whose checkpoints go to a real registry, which restarts, refuses, fills up and collects garbage: a checkpoint
completes or fails cleanly, training goes on, and it can be repeated."""

import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.gang.lab import TIMING, Lab, until
from tests.registry.conftest import Proxy, Registry, make_registry, proxy, registry  # noqa: F401

from stasis.core.steps import Step
from stasis.errors import CheckpointFailed, DeadlineExceeded, Denied, NoSpace, StasisError
from stasis.store.checkpoint import remove, verify

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.registry]

MakeLab = Callable[..., Lab]
MIB = 1 << 20


def stored(report: Any) -> int:
    return sum(result["stats"]["stored"] for result in report.results[Step.STORE].values())


def uploads(proxy: Proxy) -> Counter[str]:  # noqa: F811
    """How often each blob was uploaded whole."""
    done = (one for one in proxy.seen if one.method in ("PUT", "POST") and one.status == 201)
    return Counter(found[1] for one in done if (found := re.search(r"digest=sha256(?:%3A|:)([0-9a-f]{64})", one.path)))


def must_go_on(one: Lab) -> None:
    one.progress()
    assert one.frozen() == []
    assert one.locked() == []


def test_two_suspensions_upload_nothing_twice(
    lab: MakeLab,
    registry: Registry,  # noqa: F811
    proxy: Proxy,  # noqa: F811
) -> None:
    one = lab(where=f"{proxy.host}/ns/job:test", env={"BALLAST": str(24 * MIB)})
    reports = []
    for _ in range(2):
        one.progress()
        reports.append(one.operator.suspend())
        registry.collect_garbage()
        one.operator.resume()
    one.progress()
    assert stored(reports[0]) > 48 * MIB
    assert stored(reports[1]) < 8 * MIB
    assert uploads(proxy)
    assert set(uploads(proxy).values()) == {1}
    assert verify(one.where) > 48 * MIB
    one.finish()


def a_few(status: int, headers: dict[str, str], count: int) -> Callable[[BaseHTTPRequestHandler], Any]:
    """Of the requests that write, the first ones are answered so."""
    left = iter(range(count))
    answer = (status, headers)
    return lambda request: (
        answer if request.command in ("POST", "PATCH", "PUT") and next(left, None) is not None else None
    )


def test_a_registry_that_restarts_or_asks_to_wait_is_waited_for(
    lab: MakeLab,
    registry: Registry,  # noqa: F811
    proxy: Proxy,  # noqa: F811
) -> None:
    one = lab(where=f"{proxy.host}/ns/job:test", env={"BALLAST": str(8 * MIB)})
    one.progress()
    for status, headers in ((503, {}), (429, {"Retry-After": "1"})):
        proxy.fault = a_few(status, headers, 3)
        one.operator.checkpoint()
        must_go_on(one)
    verify(one.where)

    def restart(what: str) -> None:
        if what == "store":
            registry.stop()
            threading.Timer(1.0, registry.start).start()

    one.on_stage = restart
    one.operator.suspend()
    one.on_stage = lambda what: None
    one.operator.resume()
    one.progress()
    one.finish()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system for little."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_full_registry_fails_a_checkpoint_cleanly(
    lab: MakeLab,
    small: Path,
    make_registry: Callable[..., Registry],  # noqa: F811
) -> None:
    one = lab(where=f"{make_registry(root=small / 'data').host}/ns/job:test", env={"BALLAST": str(24 * MIB)})
    one.progress()
    for work in (one.operator.suspend, one.operator.checkpoint):
        with pytest.raises(CheckpointFailed) as failed:
            work()
        assert isinstance(failed.value.__cause__, NoSpace)
        must_go_on(one)
    subprocess.run(["mount", "-o", "remount,size=400m", small], check=True)
    one.operator.suspend()
    one.operator.resume()
    one.progress()
    one.finish()


def test_a_registry_that_refuses_fails_a_checkpoint_cleanly(lab: MakeLab, proxy: Proxy) -> None:  # noqa: F811
    """At the first upload, at the second rank's manifest, and at the tag, when the gang has been released."""
    one = lab(where=f"{proxy.host}/ns/job:test")
    one.progress()
    for part in ("/blobs/uploads/", "/manifests/sha256:"):
        proxy.fault = lambda request, part=part: (  # type: ignore[misc]
            (403, {}) if part in request.path and request.command in ("POST", "PUT") else None
        )
        with pytest.raises(CheckpointFailed) as failed:
            one.operator.suspend()
        assert isinstance(failed.value.__cause__, Denied)
        must_go_on(one)
    proxy.fault = lambda request: None
    one.operator.checkpoint()
    one.progress()
    proxy.fault = lambda request: (403, {}) if request.command == "PUT" and request.path.endswith("/test") else None
    with pytest.raises(Denied):
        one.operator.suspend()
    with pytest.raises(Denied):
        one.operator.resume()  # never the checkpoint before
    proxy.fault = lambda request: None
    one.operator.resume()
    one.progress()
    one.finish()


def test_a_registry_that_hangs_keeps_no_rank_frozen(lab: MakeLab, proxy: Proxy) -> None:  # noqa: F811
    """The ranks run on once the checkpoint is given up, though what stores it still waits for an answer."""
    one = lab(where=f"{proxy.host}/ns/job:test", timing=replace(TIMING, frozen=600.0, limits={Step.STORE: 1.0}))
    one.progress()
    answer = threading.Event()
    proxy.fault = lambda request: answer.wait(100) and None if "/blobs/uploads/" in request.path else None
    failed: list[StasisError] = []

    def suspend() -> None:
        try:
            one.operator.suspend()
        except StasisError as error:
            failed.append(error)

    suspending = threading.Thread(target=suspend)
    suspending.start()
    assert until(lambda: one.frozen() == [0, 1])
    one.progress()
    answer.set()
    suspending.join()
    assert isinstance(failed[0], DeadlineExceeded)
    must_go_on(one)
    one.operator.suspend()
    one.operator.resume()
    one.progress()
    one.finish()


def manifests(registry: Registry) -> set[str]:  # noqa: F811
    """Revisions of the gang's repository, tagged or not."""
    folder = registry.root / "docker/registry/v2/repositories/ns/job/_manifests/revisions/sha256"
    return {path.parent.name for path in folder.glob("*/link")}


@pytest.mark.slow
def test_what_an_aborted_checkpoint_has_stored_goes_when_the_registry_is_back(
    lab: MakeLab,
    registry: Registry,  # noqa: F811
    proxy: Proxy,  # noqa: F811
) -> None:
    one = lab(where=f"{proxy.host}/ns/job:test")
    one.progress()
    put = iter(range(1))

    def fault(request: BaseHTTPRequestHandler) -> Any:
        if request.command == "DELETE":
            return (503, {})
        if request.command == "PUT" and "/manifests/" in request.path:
            return (403, {}) if next(put, None) is None else None
        return None

    proxy.fault = fault
    with pytest.raises(CheckpointFailed):
        one.operator.checkpoint()
    assert len(manifests(registry)) == 1
    must_go_on(one)
    proxy.fault = lambda request: None
    one.operator.checkpoint()
    assert len(manifests(registry)) == 3
    one.finish()


@pytest.mark.slow
def test_garbage_collection_between_two_checkpoints_loses_nothing(
    lab: MakeLab,
    registry: Registry,  # noqa: F811
) -> None:
    one = lab(where=f"{registry.host}/ns/job:test", env={"BALLAST": str(8 * MIB)})
    for gone in (False, True):
        one.progress()
        one.operator.checkpoint()
        if gone:  # also what the next one would build upon
            remove(one.where)
        registry.collect_garbage()
    one.operator.suspend()
    verify(one.where)
    one.operator.resume()
    one.progress()
    one.finish()


@pytest.mark.slow
def test_a_registry_that_refuses_deletion_keeps_what_is_replaced(
    lab: MakeLab,
    make_registry: Callable[..., Registry],  # noqa: F811
) -> None:
    strict = make_registry(delete=False)
    one = lab(where=f"{strict.host}/ns/job:test")
    for _ in range(2):
        one.operator.checkpoint()
    assert len(manifests(strict)) == 6
    one.finish()
