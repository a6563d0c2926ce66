"""OCI descriptors, manifests and image indexes: written here, and read with bounds, since they may be foreign.

Sizes are bytes, digests are `sha256:<hex>`. Anything malformed is errors.Corrupt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stasis.errors import Corrupt
from stasis.store.reference import DIGEST

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
RANK_ARTIFACT = "application/vnd.stasis.rank.v1"
CHECKPOINT_ARTIFACT = "application/vnd.stasis.checkpoint.v1"
RANK_CONFIG = "application/vnd.stasis.rank.config.v1+json"
CHUNK_INDEX = "application/vnd.stasis.index.v1"
PACK = "application/vnd.stasis.pack.v1"

UID = "dev.stasis.checkpoint.uid"
RANK = "dev.stasis.checkpoint.rank"
CONFIG = "dev.stasis.checkpoint.config"
REF_NAME = "org.opencontainers.image.ref.name"

MAX_MANIFEST = 4 << 20  # what registries accept
MAX_BLOB = 1 << 40

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Descriptor:
    """What OCI calls a descriptor: a blob's or manifest's type, digest and size."""

    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type:
            out["artifactType"] = self.artifact_type
        if self.annotations:
            out["annotations"] = dict(self.annotations)
        return out

    @classmethod
    def from_dict(cls, raw: object, where: str = "descriptor") -> Descriptor:
        if not isinstance(raw, dict):
            raise Corrupt(f"{where}: a descriptor is no JSON object")
        media, digest, size = raw.get("mediaType"), raw.get("digest"), raw.get("size")
        artifact, notes = raw.get("artifactType", ""), raw.get("annotations") or {}
        if not isinstance(media, str) or not isinstance(artifact, str) or max(len(media), len(artifact)) > 255:
            raise Corrupt(f"{where}: a descriptor has no valid media type")
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise Corrupt(f"{where}: {digest!r:.100} is no sha256 digest")
        if type(size) is not int or not 0 <= size <= MAX_BLOB:
            raise Corrupt(f"{where}: {size!r:.100} is no valid size of {digest}")
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise Corrupt(f"{where}: the annotations of {digest} are no strings")
        return cls(media, digest, size, artifact, notes)


def digest_of(*buffers: Buffer) -> str:
    state = hashlib.sha256()
    for buffer in buffers:
        state.update(buffer)
    return f"sha256:{state.hexdigest()}"


def describe(media_type: str, body: bytes, **more: Any) -> Descriptor:
    return Descriptor(media_type, digest_of(body), len(body), **more)


def rank_manifest(uid: str, rank: int, config: Descriptor, layers: Sequence[Descriptor]) -> bytes:
    return encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": RANK_ARTIFACT,
            "config": config.as_dict(),
            "layers": [layer.as_dict() for layer in layers],
            "annotations": {UID: uid, RANK: str(rank)},
        }
    )


def checkpoint_index(uid: str, ranks: Sequence[Descriptor], config: Mapping[str, Any]) -> bytes:
    return encode(
        {
            "schemaVersion": 2,
            "mediaType": IMAGE_INDEX,
            "artifactType": CHECKPOINT_ARTIFACT,
            "manifests": [rank.as_dict() for rank in ranks],
            "annotations": {UID: uid, CONFIG: encode(config).decode()},
        }
    )


def encode(value: object) -> bytes:
    """Canonical enough that the same value gives the same digest."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False).encode()


@dataclass(frozen=True)
class Manifest:
    """A parsed image manifest or image index."""

    descriptor: Descriptor
    body: bytes
    artifact_type: str
    children: tuple[Descriptor, ...]  # layers of a manifest, manifests of an index
    config: Descriptor | None
    annotations: Mapping[str, str]

    @property
    def is_checkpoint(self) -> bool:
        return self.artifact_type == CHECKPOINT_ARTIFACT

    @property
    def needs(self) -> tuple[Descriptor, ...]:
        """Every blob or manifest that this one names."""
        return ((self.config,) if self.config else ()) + self.children


def parse_manifest(body: bytes, where: str) -> Manifest:
    """`where` names the manifest in errors; the body's digest has been checked by the caller."""
    raw = parse_json(body, where, MAX_MANIFEST)
    media = raw.get("mediaType")
    if raw.get("schemaVersion") != 2 or media not in (MANIFEST, IMAGE_INDEX):
        raise Corrupt(f"{where}: {media!r:.100} is neither an OCI image manifest nor an image index")
    listed = raw.get("layers" if media == MANIFEST else "manifests")
    if not isinstance(listed, list):
        raise Corrupt(f"{where}: lists nothing")
    own = Descriptor.from_dict(
        {
            **describe(media, body).as_dict(),
            "artifactType": raw.get("artifactType", ""),
            "annotations": raw.get("annotations"),
        },
        where,
    )
    return Manifest(
        descriptor=Descriptor(own.media_type, own.digest, own.size, own.artifact_type),
        body=body,
        artifact_type=own.artifact_type,
        children=tuple(Descriptor.from_dict(child, where) for child in listed),
        config=Descriptor.from_dict(raw.get("config"), where) if media == MANIFEST else None,
        annotations=own.annotations,
    )


def parse_json(body: bytes | str, where: str, limit: int) -> dict[str, Any]:
    if len(body) > limit:
        raise Corrupt(f"{where}: {len(body)} bytes of JSON, at most {limit} are allowed")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Corrupt(f"{where}: no JSON object")
    return value
