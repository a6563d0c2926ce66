"""Certificates of our own: an authority, and leaves that it signs. Pure but for keys and the time of day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=90)
SKEW = timedelta(minutes=5)  # other hosts' clocks may be slow by so much
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    @property
    def parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate)


def make_authority(now: datetime, life: timedelta = AUTHORITY_LIFE) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Stasis {now:%Y-%m-%d}")
    certificate = (
        _builder(name, name, key.public_key(), now, life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(_PEM), _private(key))


def make_leaf(authority: Pair, names: Sequence[str], now: datetime, life: timedelta = LEAF_LIFE) -> Pair:
    """For these DNS names, the first one also as the subject's: servers and clients alike."""
    issuer = authority.parsed
    signer = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name(names[0]), issuer.subject, key.public_key(), now, life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(_PEM), _private(key))


def is_current(leaf: bytes, authority: Pair, names: Sequence[str], now: datetime) -> bool:
    """Whether a leaf is of this authority, for these names, and has more than a third of its life before it."""
    try:
        certificate = x509.load_pem_x509_certificate(leaf)
        certificate.verify_directly_issued_by(authority.parsed)
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # whatever is wrong with it: it is made anew
        return False
    return found.get_values_for_type(x509.DNSName) == list(names) and left(certificate, now) > 1 / 3


def left(certificate: x509.Certificate, now: datetime) -> float:
    """Which part of its life is before it; below 0 where it is over."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return (end - now) / (end - begin)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def utcnow() -> datetime:
    return datetime.now(UTC)
