"""References as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stasis.errors import UsageError
from stasis.store.reference import Reference

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "path", "tag", "digest"),
    [
        ("oci:/var/lib/stasis:step-5", "/var/lib/stasis", "step-5", ""),
        ("/var/lib/stasis", "/var/lib/stasis", "", ""),
        ("/a:b/c:d", "/a:b/c", "d", ""),
        (f"/x@{DIGEST}", "/x", "", DIGEST),
        ("oci:store:one", f"{Path.cwd()}/store", "one", ""),
        ("./store:one", f"{Path.cwd()}/store", "one", ""),
        ("../store", f"{Path.cwd()}/../store", "", ""),
    ],
)
def test_folders(text: str, path: str, tag: str, digest: str) -> None:
    reference = Reference.parse(text)
    assert (str(reference.path), reference.tag, reference.digest) == (path, tag, digest)
    assert Reference.parse(str(reference)) == reference


@pytest.mark.parametrize(
    ("text", "host", "name", "tag", "digest"),
    [
        ("localhost/job", "localhost", "job", "", ""),
        ("127.0.0.1:5000/ns/job:step-5", "127.0.0.1:5000", "ns/job", "step-5", ""),
        ("ghcr.io/Me/job:1".lower(), "ghcr.io", "me/job", "1", ""),
        (f"reg.example.com:443/a/b/c@{DIGEST}", "reg.example.com:443", "a/b/c", "", DIGEST),
        ("[::1]:5000/job", "[::1]:5000", "job", "", ""),
    ],
)
def test_registries(text: str, host: str, name: str, tag: str, digest: str) -> None:
    reference = Reference.parse(text)
    assert (reference.host, reference.name, reference.tag, reference.digest) == (host, name, tag, digest)
    assert Reference.parse(str(reference)) == reference


@pytest.mark.parametrize("text", ["", "job", "ns/job", "job:tag", "oci:", "/x:.bad", "/x@sha256:short"])
def test_what_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Reference.parse(text)


@pytest.mark.parametrize("name", ["UPPER", "", "a:", "a/../b", "a:b/c", "a b"])
def test_names_that_no_registry_takes_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Reference.parse(f"host.io/{name}")
