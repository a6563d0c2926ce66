"""Checkpoints in their registry, as the controller handles them: publishes, looks at, removes. These calls block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from stasis.core.rankconfig import RankConfig
from stasis.errors import NotFound
from stasis.store.checkpoint import forget, publish
from stasis.store.connect import open_repository
from stasis.store.http import HttpOptions
from stasis.store.media import MANIFEST, RANK, RANK_ARTIFACT, UID, Descriptor
from stasis.store.reader import RankReader
from stasis.store.reference import Reference

SOON = HttpOptions(connect_timeout=5, read_timeout=30, patience=5)  # a registry that is down is asked again later


@dataclass(frozen=True)
class Found:
    """A committed checkpoint. Bytes; `addresses`: by which the processes know each rank, its first pod's first."""

    index: str
    addresses: Mapping[int, tuple[str, ...]]
    memory: Mapping[int, int]
    stored: Mapping[int, int]
    total: int  # each blob counted once


def put_tag(repository: str, tag: str, uid: str, manifests: Mapping[int, str], config: Mapping[str, Any]) -> Found:
    """Point the tag to the checkpoint; can be repeated. Raises StoreError."""
    with open_repository(repository, http=SOON) as opened:
        ranks = {rank: RankReader(opened, manifest) for rank, manifest in manifests.items()}
        descriptors = [
            Descriptor(
                MANIFEST,
                manifest,
                len(opened.get_manifest(manifest).body),
                RANK_ARTIFACT,
                {UID: uid, RANK: str(rank)},
            )
            for rank, manifest in sorted(manifests.items())
        ]
        index = publish(opened, tag, uid, descriptors, config)
        configs = {rank: RankConfig.from_dict(reader.config) for rank, reader in ranks.items()}
        blobs = {blob.digest: blob.size for reader in ranks.values() for blob in reader.blobs}
        return Found(
            index=index.digest,
            addresses=next(iter(configs.values())).known(),
            memory={rank: config.sizes.get("memory", 0) for rank, config in configs.items()},
            stored={rank: sum({b.digest: b.size for b in r.blobs}.values()) for rank, r in ranks.items()},
            total=sum(blobs.values()),
        )


@dataclass(frozen=True)
class Needs:
    """Of a restore: the addresses by which the processes know each rank, the builds of init that they were under."""

    addresses: Mapping[int, tuple[str, ...]]
    inits: tuple[str, ...]


def look(repository: str, manifests: Mapping[int, str]) -> Needs:
    """Raises StoreError where a rank's part cannot be read: then it cannot be restored either."""
    with open_repository(repository, http=SOON) as opened:
        configs = [RankConfig.from_dict(RankReader(opened, m).config) for _, m in sorted(manifests.items())]
    inits = {PurePosixPath(config.init).parent.name for config in configs}
    return Needs(configs[0].known(), tuple(sorted(inits)))


def remove(repository: str, index: str, manifests: Mapping[int, str]) -> None:
    """Remove what is there of a checkpoint. Raises StoreError."""
    with open_repository(Reference.parse(repository), http=SOON) as opened:
        if index:
            try:
                opened.delete_manifest(index)
            except NotFound:
                pass
        forget(opened, [Descriptor(MANIFEST, digest, 0, RANK_ARTIFACT) for digest in manifests.values()])
