"""A registry behind TLS: whom we trust, and whom it lets in."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stasis.errors import Denied, StoreError
from stasis.store.connect import open_repository
from stasis.store.http import HttpOptions
from stasis.store.reader import RankReader
from stasis.store.repository import Repository
from stasis.store.writer import RankWriter

pytestmark = pytest.mark.registry

QUICK = HttpOptions(patience=8, first_wait=0.02, longest_wait=0.2)


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def assert_there_and_back(repo: Repository) -> None:
    data = np.random.default_rng(20).bytes(2 << 20)
    writer = RankWriter(repo, uid="uid", rank=0)
    writer.put("pages-1.img", data)
    assert RankReader(repo, writer.finish({}).manifest).read("pages-1.img", len(data)) == data


def test_a_certificate_is_verified(
    make_registry: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path, "registry")
    registry = make_registry(tls=f", tls: {{certificate: {certificate}, key: {key}}}")
    where = f"{registry.host}/ns/job"
    with open_repository(where, plain_http=False) as repo, pytest.raises(StoreError, match="CERTIFICATE_VERIFY") as bad:
        repo.tags()
    assert not bad.value.retryable
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with open_repository(where, plain_http=False) as repo:
        assert_there_and_back(repo)


def test_certificates_are_found_in_certs_d(
    make_registry: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trust in the registry's, and ours for a registry that lets nobody else in."""
    certificate, key = self_signed(tmp_path, "registry")
    ours, our_key = self_signed(tmp_path, "client")
    registry = make_registry(tls=f", tls: {{certificate: {certificate}, key: {key}, clientcas: [{ours}]}}")
    folder = tmp_path / "docker" / "certs.d" / registry.host
    folder.mkdir(parents=True)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    where = f"{registry.host}/ns/job"
    shutil.copy(certificate, folder / "ca.crt")
    with open_repository(where, plain_http=False, http=QUICK) as repo, pytest.raises(StoreError):
        repo.tags()
    shutil.copy(ours, folder / "client.cert")
    with pytest.raises(Denied, match=r"client\.cert") as bad:
        open_repository(where, plain_http=False)
    assert "NAME.key" in bad.value.remedy
    shutil.copy(our_key, folder / "client.key")
    with open_repository(where, plain_http=False) as repo:
        assert_there_and_back(repo)
