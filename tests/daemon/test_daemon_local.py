"""Checkpoints that commit when the nodes' disks have them, and are uploaded afterwards."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from lightkube.types import PatchType
from tests.daemon.lab import NAMESPACE, Lab
from tests.daemon.process import until
from tests.registry.conftest import Proxy, make_registry, proxy, registry  # noqa: F401

from stasis.agent.kept import FOLDER
from stasis.core.plan import Kind, Outcome
from stasis.core.records import decision_key
from stasis.kube.client import Checkpoints

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.registry]

MakeLab = Callable[..., Lab]
LATER = (503, {"Retry-After": "1"})
WRITES = ("POST", "PATCH", "PUT")


def ask(one: Lab, **other: Any) -> dict[int, tuple[str, str]]:
    """As the controller does until all is there: how far each rank is."""
    commit = one.record(decision_key(one.home.uid))
    assert commit is not None
    ranks = {str(rank): digest for rank, digest in commit.manifests.items()}
    body = {"op": one.home.uid, "repository": one.repository, "ranks": ranks, "credentials": ""} | other
    told = one.ask("POST", "/v1/upload", body)["ranks"]
    return {int(rank): (found["state"], found["message"]) for rank, found in told.items()}


def uploaded(one: Lab) -> bool:
    return {state for state, _ in ask(one).values()} == {"Done"}


def say(one: Lab, kind: str) -> None:
    """As the controller says of a checkpoint."""
    since = "2026-01-01T00:00:00Z"
    condition = {"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": since}
    change = {"status": {"conditions": [condition]}}
    one.client.patch(Checkpoints.Status, one.home.name, change, namespace=NAMESPACE, patch_type=PatchType.MERGE)


def kept(one: Lab) -> list[Path]:
    """Files of checkpoints on the node, and journal entries of them."""
    state = one.daemon.state
    found = [Path(at, name) for at, *names in os.walk(state / FOLDER) for name in itertools.chain(*names)]
    return [*found, *state.glob("*.kept"), *state.glob("*.home")]


def suspend(one: Lab) -> None:
    operation = one.begin_suspend()
    one.end_pods()
    assert operation.outcome() is Outcome.RELEASED, operation.failures()
    assert one.controller is not None
    one.forget_but_kept(operation)


def test_an_upload_goes_on_after_the_daemon_was_killed_in_it(lab: MakeLab, proxy: Proxy) -> None:  # noqa: F811
    one = lab(ballast=24 << 20, repository=f"{proxy.host}/ns/job", local=True)
    one.progress()
    proxy.fault = lambda request: LATER
    suspend(one)
    assert proxy.seen == []  # its gang commits, is released and ends without the registry
    assert {path.stat().st_mode & 0o777 for path in kept(one) if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in kept(one) if path.is_dir()} == {0o700}

    def first(request: BaseHTTPRequestHandler) -> Any:
        """One blob comes through."""
        done = any(seen.status == 201 for seen in proxy.seen)
        return LATER if done and request.command in WRITES else None

    proxy.fault = first
    ask(one)
    assert until(lambda: sum(seen.status == 503 for seen in proxy.seen) > 3), one.daemon.tail()
    one.daemon.restart()
    proxy.fault = lambda request: None
    assert until(lambda: uploaded(one)), (ask(one), one.daemon.tail())
    say(one, "Durable")
    one.daemon.restart()
    assert until(lambda: not kept(one)), kept(one)
    one.local = False
    one.resume()  # from the registry alone


def test_what_is_gone_or_damaged_is_told_apart_from_a_registry_that_is_down(lab: MakeLab, proxy: Proxy) -> None:  # noqa: F811
    one = lab(repository=f"{proxy.host}/ns/job", local=True)
    one.progress()
    operation = one.checkpoint(Kind.CONTINUE)
    assert operation.outcome() is Outcome.CONTINUED, operation.failures()
    assert ask(one, ranks={"0": f"sha256:{'0' * 64}"}) == {0: ("Missing", "")}
    assert ask(one, op="other", ranks={"0": f"sha256:{'0' * 64}"}) == {0: ("Missing", "")}
    proxy.fault = lambda request: (404, {}) if request.command in WRITES else None
    seen: list[tuple[str, str]] = []
    assert until(lambda: any(why for _, why in seen) or seen.extend(ask(one).values())), one.daemon.tail()
    assert {state for state, _ in seen} == {"UnderWay"}
    pack = max((path for path in kept(one) if path.parent.name == "sha256"), key=lambda path: path.stat().st_size)
    pack.write_bytes(pack.read_bytes()[:-1] + b"?")
    assert until(lambda: "Broken" in {state for state, _ in ask(one).values()}), one.daemon.tail()
    one.forget_but_kept(operation)
    one.delete_checkpoint()
    one.daemon.restart()
    assert until(lambda: not kept(one)), kept(one)


def test_an_upload_of_what_is_deleted_meanwhile_leaves_nothing(lab: MakeLab, proxy: Proxy) -> None:  # noqa: F811
    one = lab(repository=f"{proxy.host}/ns/job", local=True)
    one.progress()
    operation = one.checkpoint(Kind.CONTINUE)
    assert operation.outcome() is Outcome.CONTINUED, operation.failures()
    proxy.fault = lambda request: LATER if request.command in WRITES else None
    ask(one)
    assert until(lambda: any(seen.status == 503 for seen in proxy.seen)), one.daemon.tail()
    one.delete_checkpoint()
    proxy.fault = lambda request: None
    assert until(lambda: sum(seen.method == "DELETE" and seen.status == 202 for seen in proxy.seen) == 2)
    written = [seen.path for seen in proxy.seen if seen.method == "PUT" and "/manifests/" in seen.path]
    assert sorted(written) == sorted(seen.path for seen in proxy.seen if seen.method == "DELETE")


def test_what_an_aborted_checkpoint_has_left_on_the_disk_goes(lab: MakeLab) -> None:
    one = lab(repository="127.0.0.1:1/ns/job", local=True)
    one.progress()
    (one.control / "stop").touch()
    operation = one.checkpoint(Kind.CONTINUE)
    for rank in (0, 1):
        one.tell_end(rank)
    operation.outcome()
    one.delete_checkpoint()
    one.daemon.restart()
    assert until(lambda: not kept(one)), kept(one)
