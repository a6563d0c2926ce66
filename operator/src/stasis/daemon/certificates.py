"""Who may command this node: mutual TLS, with certificates that are renewed while we run."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from stasis.errors import Unsupported

CONTROLLER = "controller.stasis.dev"  # common name of its certificate


@dataclass(frozen=True)
class Folder:
    """A folder with ca.crt, tls.crt and tls.key, as a Secret is mounted."""

    path: Path

    def stamp(self) -> tuple[int, ...]:
        """Another one when the files are others. Raises OSError."""
        return tuple((self.path / name).stat().st_mtime_ns for name in ("ca.crt", "tls.crt", "tls.key"))

    def server(self) -> ssl.SSLContext:
        """Asks for a certificate of the same authority. Raises Unsupported where the files are not there, or wrong."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.path / "ca.crt")
            context.load_cert_chain(self.path / "tls.crt", self.path / "tls.key")
        except (OSError, ssl.SSLError) as error:
            raise Unsupported(f"no usable certificates in {self.path}: {error}") from error
        return context

    def expiry(self) -> float:
        """When our certificate ends, in seconds since 1970."""
        return x509.load_pem_x509_certificate((self.path / "tls.crt").read_bytes()).not_valid_after_utc.timestamp()


def common_name(certificate: Any) -> str:
    """Of a peer's certificate as the ssl module gives it; empty where there is none."""
    names = (certificate or {}).get("subject", ())
    return next((value for name in names for key, value in name if key == "commonName"), "")
