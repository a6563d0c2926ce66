"""Who may command a node: the controller alone, by a certificate of the cluster's own authority."""

from __future__ import annotations

import json
import ssl
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.lab import Lab
from tests.daemon.process import Authority, until
from tests.support.apiserver import ApiServer

from stasis import __version__

pytestmark = [pytest.mark.root]


@pytest.fixture
def alone(tmp_path: Path, api: ApiServer) -> Iterator[Lab]:
    """A daemon on a node without pods."""
    lab = Lab("alone", tmp_path, api)
    lab.authority.folder(tmp_path / "controller", "controller.stasis.dev")
    lab.daemon.start()
    yield lab
    lab.close()


def test_the_controller_is_served(alone: Lab) -> None:
    status = alone.ask("GET", "/v1/status")
    assert (status["node"], status["ranks"]) == ("here", [])
    assert status["criu"].startswith("4.")


def test_everybody_may_see_what_the_node_has_and_lacks(alone: Lab) -> None:
    def status() -> dict[str, Any]:
        return dict(json.loads(alone.daemon.get("/v1/status", alone.daemon.metrics_port)))

    assert status()["version"] == __version__
    assert until(lambda: "checks" in status())
    checks = {check["name"]: check["status"] for check in status()["checks"]}
    assert checks["CRIU"] == "ok"
    assert "runc" not in checks


def test_another_name_of_the_same_authority_is_refused(alone: Lab, tmp_path: Path) -> None:
    other = alone.authority.folder(tmp_path / "other", "agent.stasis.dev")
    for method, path in (("GET", "/v1/status"), ("GET", "/v1/gang"), ("POST", "/v1/word")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            alone.ask(method, path, {} if method == "POST" else None, certificates=other)
        assert refused.value.code == 403


def test_another_authority_is_refused(alone: Lab, tmp_path: Path) -> None:
    other = Authority().folder(tmp_path / "other", "controller.stasis.dev")
    (other / "ca.crt").write_bytes((tmp_path / "controller/ca.crt").read_bytes())  # it trusts the daemon all the same
    with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
        alone.ask("GET", "/v1/status", certificates=other)


def test_no_certificate_is_refused(alone: Lab, tmp_path: Path) -> None:
    with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
        alone.ask("GET", "/v1/status", certificates=tmp_path / "nothing")


def test_renewed_certificates_are_taken_up(alone: Lab, tmp_path: Path) -> None:
    new = Authority()
    new.folder(alone.daemon.certificates, "agent.stasis.dev")
    new.folder(tmp_path / "renewed", "controller.stasis.dev")

    def served() -> bool:
        try:
            return bool(alone.ask("GET", "/v1/status", certificates=tmp_path / "renewed"))
        except (urllib.error.URLError, ConnectionError):
            return False

    assert until(served)
    with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
        alone.ask("GET", "/v1/status")


@pytest.mark.parametrize("body", [{}, {"container_id": 5}, {"container_id": "", "word": "run"}])
def test_a_call_that_names_no_container_is_refused_in_words(alone: Lab, body: dict[str, object]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        alone.ask("POST", "/v1/check", body)
    assert refused.value.code == 400
    assert b"no container_id" in refused.value.read()


def test_a_container_that_is_not_here_is_not_found(alone: Lab) -> None:
    for path, body in (("check", {"container_id": "abc"}), ("word", {"container_id": "abc", "word": "run"})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            alone.ask("POST", f"/v1/{path}", body)
        assert refused.value.code == 404


def test_a_hook_of_an_unknown_pod_is_answered_at_once(alone: Lab) -> None:
    assert alone.daemon.get("/prestop/0123abcd").strip() == "nothing to wait for"


def test_without_certificates_it_does_not_start(alone: Lab) -> None:
    alone.daemon.kill()
    (alone.daemon.certificates / "tls.key").write_text("nonsense")
    with pytest.raises(AssertionError, match="no usable certificates"):
        alone.daemon.start()
