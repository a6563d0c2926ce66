"""A repository of an OCI registry (distribution spec 1.1)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self
from urllib.parse import urlencode

from urllib3.exceptions import HTTPError

from stasis.errors import Corrupt, NotFound, StoreError, Unavailable
from stasis.store import media
from stasis.store.credentials import Credentials, find_credentials
from stasis.store.http import Answer, Client, HttpOptions, Refusal, Retries
from stasis.store.media import Buffer, Descriptor, Manifest
from stasis.store.reference import DIGEST, Reference
from stasis.store.repository import PROBE, read, tail

_AT_ONCE = 512 << 10  # a blob up to this size needs no PATCH
_PATCH = 32 << 20  # bytes sent before the registry confirms
_RESTARTS = 5  # uploads begun anew before one is given up
PLAIN_HTTP = "STASIS_PLAIN_HTTP_REGISTRIES"  # environment: hosts without TLS beside the loopback, by commas

_BREAKS = 3  # answers of 500 about one blob, after which it is uploaded
_READ = 1 << 20
_EMPTY = 3  # answers without the bytes that they announce, after which the blob counts as lost
_TAGS_PAGE = 1000
_ACCEPT = {"Accept": f"{media.MANIFEST}, {media.IMAGE_INDEX}"}


class RegistryRepository:
    """`credentials`: handed over, or how to get them when they are asked for; else those of the usual places.
    `plain_http`: None means for the loopback and what the environment's PLAIN_HTTP names."""

    def __init__(
        self,
        reference: Reference,
        *,
        credentials: Credentials | Callable[[], Credentials | None] | None = None,
        plain_http: bool | None = None,
        options: HttpOptions | None = None,
    ) -> None:
        self._reference = reference.repository
        host, name = reference.host, reference.name

        if plain_http is None and host in os.environ.get(PLAIN_HTTP, "").split(","):
            plain_http = True

        def find() -> Credentials | None:
            if callable(credentials):
                return credentials()
            return credentials or find_credentials(host, name)

        self._client = Client(host, find, plain=plain_http, options=options or HttpOptions())
        path = f"library/{name}" if host == "docker.io" and "/" not in name else name
        self._at = f"/v2/{path}"

    @property
    def reference(self) -> Reference:
        return self._reference

    def stat(self, digest: str) -> int | None:
        try:
            return _length(self._client.request("HEAD", f"{self._at}/blobs/{digest}"))
        except NotFound:
            return None

    def push(self, descriptor: Descriptor, buffers: Sequence[Buffer]) -> bool:
        found = self._found(descriptor.digest)
        if found == descriptor.size and self._holds(descriptor, buffers):
            return False
        self._upload(descriptor, buffers)
        if found not in (None, descriptor.size) and self.stat(descriptor.digest) != descriptor.size:
            raise Corrupt(
                f"{descriptor.digest} in {self._reference} has {found} bytes, not {descriptor.size}, and the registry "
                "does not replace it; delete that blob's file there, or collect its garbage"
            )
        return True

    def _found(self, digest: str) -> int | None:
        """As `stat`; None also where the registry breaks over this very blob: docker-registry, its disk full in the
        midst of writing a link, answers 500 for it until the link is written anew, as an upload does."""
        retries, breaks = Retries(self._client.options), 0
        while True:
            try:
                return _length(self._client.once("HEAD", f"{self._at}/blobs/{digest}"))
            except NotFound:
                return None
            except StoreError as error:
                breaks += isinstance(error, Unavailable) and error.status == 500
                if breaks == _BREAKS:
                    return None
                retries.wait(error)

    def _holds(self, descriptor: Descriptor, buffers: Sequence[Buffer]) -> bool:
        """A range is read and compared: HEAD alone may come from a cache that outlived the blob (rule 32)."""
        expected = tail(buffers, PROBE)
        try:
            offset = descriptor.size - len(expected)
            return not expected or read(self, descriptor.digest, offset, len(expected)) == expected
        except (NotFound, Corrupt):
            return False

    def _upload(self, descriptor: Descriptor, buffers: Sequence[Buffer]) -> None:
        for left in reversed(range(_RESTARTS)):
            try:
                return _Upload(self._client, f"{self._at}/blobs", descriptor, buffers).run()
            except (NotFound, Refusal):
                # The registry forgot the upload, or has other bytes of it than we sent: the digest told.
                if not left:
                    raise
        raise AssertionError("unreachable")

    def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        if not DIGEST.fullmatch(digest):
            raise Corrupt(f"{digest!r:.100} is no sha256 digest")
        retries, done, empty = Retries(self._client.options), 0, 0
        while done < len(into):
            try:
                for count in self._pieces(digest, offset + done, into[done:]):
                    done += count
                    empty = 0
            except _Broken as error:
                empty += 1
                if empty == _EMPTY:
                    raise Corrupt(
                        f"{digest}: {self._reference.host} announces but does not send it, as after garbage collection"
                    ) from error
                retries.wait(error)
            except StoreError as error:
                retries.wait(error)

    def _pieces(self, digest: str, offset: int, into: memoryview) -> Iterator[int]:
        """Yields how many bytes arrived, so that what came before a connection broke is kept."""
        url, wanted, done = f"{self._at}/blobs/{digest}", len(into), 0
        try:
            headers = {"Range": f"bytes={offset}-{offset + wanted - 1}"}
            response = self._client.stream("GET", url, headers=headers)
        except Refusal as error:
            if error.status == 416:
                raise Corrupt(f"{digest} in {self._reference} ends before byte {offset}") from None
            raise
        try:
            skip = 0 if response.status == 206 else offset
            while skip and (data := response.read(min(skip, _READ))):
                skip -= len(data)
            while done < wanted and (data := response.read(min(wanted - done, _READ))):
                into[done : done + len(data)] = data
                done += len(data)
                yield len(data)
        except (HTTPError, OSError) as error:
            raise _Broken(f"GET {url} in {self._reference}: {type(error).__name__}: {error}") from error
        finally:
            if done == wanted:
                response.release_conn()
            else:
                response.close()
        if done < wanted:
            raise Corrupt(f"{digest} in {self._reference} ends at byte {offset + done}, not at {offset + wanted}")

    def put_manifest(self, body: bytes, media_type: str, tag: str = "") -> Descriptor:
        descriptor = media.parse_manifest(body, "manifest").descriptor
        self._put_manifest(body, media_type, tag or descriptor.digest)
        try:
            self.get_manifest(descriptor.digest)
        except NotFound:
            # docker-registry writes nothing where its cache outlived a garbage collection. As a blob it does.
            self._upload(descriptor, [body])
            self._put_manifest(body, media_type, tag or descriptor.digest)
            self.get_manifest(descriptor.digest)
        return descriptor

    def _put_manifest(self, body: bytes, media_type: str, reference: str) -> None:
        url = f"{self._at}/manifests/{reference}"
        self._client.request("PUT", url, headers={"Content-Type": media_type}, body=[body])

    def get_manifest(self, reference: str) -> Manifest:
        url = f"{self._at}/manifests/{reference}"
        answer = self._client.request("GET", url, headers=_ACCEPT)
        body = answer.body
        digest = reference if DIGEST.fullmatch(reference) else answer.headers.get("Docker-Content-Digest", "")
        if DIGEST.fullmatch(digest) and media.digest_of(body) != digest:
            raise Corrupt(f"manifest {digest} in {self._reference}: its bytes have another digest")
        return media.parse_manifest(body, f"manifest {reference}")

    def delete_manifest(self, digest: str) -> None:
        try:
            self._client.request("DELETE", f"{self._at}/manifests/{digest}")
        except Refusal as error:
            if error.status not in (400, 405):
                raise
            raise StoreError(
                f"{self._reference.host} refuses to delete manifests: {error.message}",
                remedy="allow deletion (docker-registry: storage.delete.enabled) or remove it by the registry's means",
            ) from None

    def tags(self) -> list[str]:
        found: set[str] = set()
        last = ""
        while True:
            query = {"n": str(_TAGS_PAGE)} | ({"last": last} if last else {})
            try:
                answer = self._client.request("GET", f"{self._at}/tags/list?{urlencode(query)}")
            except NotFound:
                return []
            listed = media.parse_json(answer.body, f"tags of {self._reference}", media.MAX_MANIFEST).get("tags") or []
            new = {tag for tag in listed if isinstance(tag, str)} - found
            found |= new
            if not new or "next" not in answer.headers.get("Link", ""):
                return sorted(found)
            last = listed[-1]

    def sweep(self) -> int:
        """The registry's own garbage collection does it."""
        return 0

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Broken(Unavailable):
    """The connection broke in a body."""


class _Upload:
    """One chunked upload: POST, PATCH until all is there, PUT. After one that broke the registry is asked how much
    it has; nothing is sent twice blindly."""

    def __init__(self, client: Client, at: str, descriptor: Descriptor, buffers: Sequence[Buffer]) -> None:
        self._client, self._at, self._blob = client, at, descriptor
        self._views = [memoryview(buffer) for buffer in buffers]
        self._retries = Retries(client.options)
        self._location = ""
        self._offset = 0

    def run(self) -> None:
        self._follow(self._client.request("POST", f"{self._at}/uploads/"))
        try:
            self._send()
        except StoreError:
            self._cancel()
            raise

    def _send(self) -> None:
        while True:
            try:
                if not self._offset and self._blob.size <= _AT_ONCE:
                    return self._commit(self._views)
                while self._offset < self._blob.size:
                    self._patch()
                return self._commit([])
            except Unavailable as error:
                self._retries.wait(error)
                if self._ask():
                    return None

    def _cancel(self) -> None:
        """So that what was sent takes no room; a registry that does not answer forgets it by itself one day."""
        try:
            self._client.once("DELETE", self._location)
        except StoreError:
            return

    def _patch(self) -> None:
        end = min(self._offset + _PATCH, self._blob.size)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{self._offset}-{end - 1}",
        }
        response = self._client.once("PATCH", self._location, headers=headers, body=self._slice(self._offset, end))
        self._follow(response)
        self._offset = _confirmed(response, end)
        self._retries = Retries(self._client.options)  # it goes on, so patience begins anew

    def _commit(self, body: Sequence[Buffer]) -> None:
        mark = "&" if "?" in self._location else "?"
        url = f"{self._location}{mark}{urlencode({'digest': self._blob.digest})}"
        self._client.once("PUT", url, headers={"Content-Type": "application/octet-stream"}, body=body)

    def _ask(self) -> bool:
        """Finds out how far the upload is; True if the blob is there after all. NotFound: the upload is forgotten."""
        try:
            response = self._client.request("GET", self._location)
        except NotFound:
            head = self._client.request("HEAD", f"{self._at}/{self._blob.digest}")
            return head.headers.get("Content-Length") == str(self._blob.size)
        self._follow(response)
        self._offset = _confirmed(response, 0)
        return False

    def _follow(self, response: Answer) -> None:
        self._location = response.headers.get("Location", self._location)
        if not self._location:
            raise StoreError("the registry gives no location for an upload")

    def _slice(self, start: int, end: int) -> list[memoryview]:
        out = []
        for view in self._views:
            if start < len(view) and end > 0:
                out.append(view[max(start, 0) : end])
            start, end = start - len(view), end - len(view)
        return out


def _length(response: Answer) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _confirmed(response: Answer, otherwise: int) -> int:
    """Bytes that the registry has, by its Range header; '0-0' also stands for none."""
    match = re.fullmatch(r"(?:bytes=)?0-(\d{1,15})", response.headers.get("Range", ""))
    if not match:
        return otherwise
    last = int(match[1])
    return last + 1 if last else 0
