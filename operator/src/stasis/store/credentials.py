"""Registry credentials from the usual places, never kept: docker's config.json with its helpers, then containers'
auth.json (podman, skopeo, buildah)."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stasis.errors import Denied

_HELPER_SECONDS = 30
_LIMIT = 4 << 20

_handed: dict[tuple[str, str], Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Credentials:
    """A user's name and password, or an `identity_token` to be exchanged for access tokens."""

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


def hand_over(host: str, name: str, config: str) -> None:
    """Use for this repository, instead of any other place, what a Secret of type kubernetes.io/dockerconfigjson says,
    in this process's memory alone. Helpers that it names are not run. Raises Denied where it is none."""
    _handed[host, name] = _auths(host, name, config)


def find_in(config: str, host: str, name: str) -> Credentials | None:
    """Those that such a Secret has for a repository. Raises Denied where it is none."""
    return _in_config(_auths(host, name, config), host, name, Path("the Secret"))


def _auths(host: str, name: str, config: str) -> dict[str, Any]:
    try:
        auths = json.loads(config)["auths"]
        if not isinstance(auths, dict):
            raise ValueError("auths is no object")
    except (ValueError, KeyError, TypeError) as error:
        raise Denied(f"the credentials for {host}/{name} are no docker config: {error}") from None
    return {"auths": auths}


def withdraw(host: str, name: str) -> None:
    """Forget what was handed over for a repository."""
    _handed.pop((host, name), None)


def find_credentials(host: str, name: str) -> Credentials | None:
    """Those for a registry's host (with port) and repository; None if there are none: then access is anonymous."""
    if (handed := _handed.get((host, name))) is not None:
        return _in_config(handed, host, name, Path("the Secret"))
    for path in _places():
        try:
            with path.open("rb") as file:
                config = json.loads(file.read(_LIMIT))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise Denied(f"cannot read registry credentials from {path}: {error}") from None
        if isinstance(config, dict) and (found := _in_config(config, host, name, path)):
            return found
    return None


def _places() -> Iterator[Path]:
    home = Path(os.environ.get("HOME", "/root"))
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    if explicit := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(explicit)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers" / "auth.json"


def _in_config(config: Mapping[str, Any], host: str, name: str, path: Path) -> Credentials | None:
    helpers, auths = config.get("credHelpers") or {}, config.get("auths") or {}
    for key in _keys(host, name):
        if isinstance(helpers, dict) and key in helpers and (found := _ask_helper(helpers[key], key)):
            return found
    for key in _keys(host, name):
        entry = auths.get(key) if isinstance(auths, dict) else None
        if isinstance(entry, dict) and (found := _in_entry(entry, key, path)):
            return found
    store = config.get("credsStore")
    for key in _keys(host, "") if store else ():
        if found := _ask_helper(store, key):
            return found
    return None


def _keys(host: str, name: str) -> Iterator[str]:
    """Under what a file may hold the credentials, the narrowest first."""
    parts = name.split("/") if name else []
    for count in range(len(parts), 0, -1):
        yield "/".join([host, *parts[:count]])
    yield host
    yield f"https://{host}"
    if host == "docker.io":
        yield "https://index.docker.io/v1/"
    else:
        yield f"https://{host}/v1/"
        yield f"https://{host}/v2/"


def _in_entry(entry: Mapping[str, Any], key: str, path: Path) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials(identity_token=str(token))
    if not entry.get("auth"):
        return None
    try:
        username, colon, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise Denied(f"{path}: the auth entry of {key} is not base64 of USER:PASSWORD")
    return Credentials(username, password.rstrip("\0"))


def _ask_helper(helper: object, key: str) -> Credentials | None:
    if not isinstance(helper, str) or not re.fullmatch(r"[A-Za-z0-9._-]+", helper):
        raise Denied(f"{helper!r:.100} is no name of a credential helper")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run([program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Denied(f"cannot run {program}: {error}", remedy="install it, or remove it from the config") from None
    if done.returncode:
        if b"credentials not found" in done.stdout + done.stderr:
            return None
        raise Denied(
            f"{program} failed for {key}: {(done.stderr or done.stdout)[:200].decode(errors='replace').strip()}"
        )
    try:
        answer = json.loads(done.stdout[:_LIMIT])
        username, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise Denied(f"{program} gave no credentials for {key}") from None
    if username == "<token>":
        return Credentials(identity_token=secret)
    return Credentials(username, secret)
