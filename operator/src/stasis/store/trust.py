"""Whom a registry's host is trusted by and what it is shown: certs.d folders, as docker and podman read them.

`HOST[:PORT]/*.crt` there are further authorities for that host, `NAME.cert` with `NAME.key` a certificate of ours.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from stasis.errors import Denied


def tls_context(host: str) -> ssl.SSLContext:
    """What is read here stays read: whoever connects later may not be able to read the files. Raises Denied."""
    context = ssl.create_default_context()
    for file in (file for place in _places() for file in sorted((place / host).glob("*.c*rt"))):
        try:
            if file.suffix == ".crt":
                context.load_verify_locations(file)
            elif file.suffix == ".cert":
                context.load_cert_chain(file, file.with_suffix(".key"))
        except (OSError, ssl.SSLError) as error:
            raise Denied(
                f"cannot use the certificate {file}: {error}",
                remedy="PEM files: *.crt of authorities, NAME.cert with its NAME.key",
            ) from None
    return context


def _places() -> Iterator[Path]:
    home = Path(os.environ.get("HOME", "/root"))
    yield Path("/etc/docker/certs.d")
    yield Path("/etc/containers/certs.d")
    yield Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers" / "certs.d"
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "certs.d"
