"""Registry credentials are found where docker, podman and skopeo keep them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from stasis.errors import Denied
from stasis.store.credentials import Credentials, find_credentials, hand_over, withdraw


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path


def entry(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def docker(home: Path, config: dict[str, Any]) -> None:
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker" / "config.json").write_text(json.dumps(config))


def helper(home: Path, name: str, script: str) -> None:
    path = home / "bin" / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_nothing_is_anonymous() -> None:
    assert find_credentials("reg.io", "job") is None


def test_dockers_config(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(home, {"auths": {"reg.io:5000": entry("me", "pa:ss"), "https://other.io/v1/": {"identitytoken": "t"}}})
    assert find_credentials("reg.io:5000", "job") == Credentials("me", "pa:ss")
    assert find_credentials("other.io", "job") == Credentials(identity_token="t")
    assert find_credentials("reg.io", "job") is None
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / "config.json").write_text(json.dumps({"auths": {"reg.io": entry("a", "b")}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "elsewhere"))
    assert find_credentials("reg.io", "job") == Credentials("a", "b")


def test_containers_auth_file_may_name_a_namespace(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    (home / "containers").mkdir()
    auths = {"reg.io": entry("all", "1"), "reg.io/ns": entry("ns", "2")}
    (home / "containers" / "auth.json").write_text(json.dumps({"auths": auths}))
    assert find_credentials("reg.io", "ns/job") == Credentials("ns", "2")
    assert find_credentials("reg.io", "other/job") == Credentials("all", "1")


def test_a_helper_is_asked(home: Path) -> None:
    helper(
        home, "vault", """read host; printf '{"ServerURL":"%s","Username":"u","Secret":"for %s"}' "$host" "$host\""""
    )
    helper(home, "store", """printf '{"Username":"<token>","Secret":"refresh"}'""")
    docker(home, {"credHelpers": {"reg.io": "vault"}, "credsStore": "store"})
    assert find_credentials("reg.io", "job") == Credentials("u", "for reg.io")
    assert find_credentials("other.io", "job") == Credentials(identity_token="refresh")


def test_a_helper_that_has_none_is_no_error_but_one_that_fails_is(home: Path) -> None:
    helper(home, "none", "echo credentials not found in native keychain; exit 1")
    docker(home, {"credsStore": "none"})
    assert find_credentials("reg.io", "job") is None
    helper(home, "none", "echo the keychain is locked >&2; exit 1")
    with pytest.raises(Denied, match="keychain is locked"):
        find_credentials("reg.io", "job")
    docker(home, {"credsStore": "missing"})
    with pytest.raises(Denied, match="docker-credential-missing"):
        find_credentials("reg.io", "job")
    docker(home, {"credsStore": "../../bin/sh"})
    with pytest.raises(Denied):
        find_credentials("reg.io", "job")


def test_a_broken_config_is_named(home: Path) -> None:
    docker(home, {})
    (home / ".docker" / "config.json").write_text("{")
    with pytest.raises(Denied, match=r"config\.json"):
        find_credentials("reg.io", "job")


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(Credentials("user", "secret", "secret"))


def test_what_is_handed_over_counts_for_its_repository_alone(home: Path) -> None:
    docker(home, {"auths": {"reg.io": entry("node", "1")}})
    helper(home, "evil", f"touch {home}/run")
    secret = {"auths": {"reg.io": entry("job", "2")}, "credHelpers": {"reg.io": "evil"}, "credsStore": "evil"}
    hand_over("reg.io", "team/job", json.dumps(secret))
    try:
        assert find_credentials("reg.io", "team/job") == Credentials("job", "2")
        assert find_credentials("reg.io", "team/other") == Credentials("node", "1")
        hand_over("reg.io", "team/job", json.dumps({"auths": {"elsewhere.io": entry("job", "2")}}))
        assert find_credentials("reg.io", "team/job") is None  # the node's own are not for this job
    finally:
        withdraw("reg.io", "team/job")
    assert find_credentials("reg.io", "team/job") == Credentials("node", "1")
    assert not (home / "run").exists()


@pytest.mark.parametrize("config", ["", "[]", '{"auths": []}', "{}"])
def test_what_is_no_docker_config_is_refused(config: str) -> None:
    with pytest.raises(Denied, match=r"reg\.io/job"):
        hand_over("reg.io", "job", config)
