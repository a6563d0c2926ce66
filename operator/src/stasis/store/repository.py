"""The place where blobs and manifests are kept: one interface, an OCI layout folder and an OCI registry behind it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from stasis.errors import Corrupt, NotFound
from stasis.store.media import Buffer, Descriptor, Manifest, digest_of
from stasis.store.reference import Reference

PROBE = 64 << 10  # bytes read back of a blob that was there before


class Repository(Protocol):
    """Safe for several threads. Errors: NotFound, Denied, NoSpace, Unavailable (after retries), Corrupt."""

    @property
    def reference(self) -> Reference:
        """Where it is, without tag and digest."""

    def stat(self, digest: str) -> int | None:
        """A blob's size, None if it is not there. No proof that its bytes are (rule 32)."""

    def push(self, descriptor: Descriptor, buffers: Sequence[Buffer]) -> bool:
        """Makes the blob durable; False if it was there, with a range of it compared. `buffers` make up its bytes."""

    def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        """Fills `into` with the bytes of a blob from `offset` on; fewer are errors.Corrupt."""

    def put_manifest(self, body: bytes, media_type: str, tag: str = "") -> Descriptor:
        """Stores a manifest whose children are all there, and points `tag` to it if given."""

    def get_manifest(self, reference: str) -> Manifest:
        """By tag or digest; by digest its bytes are verified."""

    def delete_manifest(self, digest: str) -> None:
        """Also removes the tags that point to it. NotFound if it is not there."""

    def tags(self) -> list[str]:
        """Sorted; empty for a repository that does not exist yet."""

    def sweep(self) -> int:
        """Removes the blobs that no manifest needs, where that is ours to do; returns the bytes freed."""

    def hold(self) -> AbstractContextManager[None]:
        """While it is open, blobs that no manifest names yet are not swept."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def read(repo: Repository, digest: str, offset: int, length: int) -> bytes:
    body = bytearray(length)
    repo.read_into(digest, offset, memoryview(body))
    return bytes(body)


def fetch(repo: Repository, descriptor: Descriptor, limit: int) -> bytes:
    """A small blob whole, with its digest verified; `limit` in bytes bounds what is allocated."""
    if descriptor.size > limit:
        raise Corrupt(f"{descriptor.digest}: {descriptor.size} bytes, at most {limit} are allowed")
    try:
        body = read(repo, descriptor.digest, 0, descriptor.size)
    except NotFound:
        raise Corrupt(f"{descriptor.digest} ({descriptor.media_type}) is missing in {repo.reference}") from None
    if not hmac.compare_digest(digest_of(body), descriptor.digest):
        raise Corrupt(f"{descriptor.digest} ({descriptor.media_type}): its bytes have another digest")
    return body


def tail(buffers: Sequence[Buffer], length: int) -> bytes:
    """The last `length` bytes of `buffers`: what is compared when a blob is found to be there already."""
    parts: list[bytes] = []
    for buffer in reversed(buffers):
        view = memoryview(buffer)
        take = min(length, len(view))
        parts.append(bytes(view[len(view) - take :]))
        length -= take
        if not length:
            break
    return b"".join(reversed(parts))
