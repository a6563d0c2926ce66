"""An OCI image-layout folder as repository: for one machine, or a volume that several share (rule 30).

Files are 0600 and appear whole: written aside, fsynced, renamed, the folder fsynced. Every manifest is listed in
index.json, untagged until it is published, so that what is complete is never swept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from stasis.errors import Corrupt, Denied, NoSpace, NotFound, StoreError
from stasis.store import media
from stasis.store.media import Buffer, Descriptor, Manifest
from stasis.store.reference import DIGEST, Reference
from stasis.store.repository import PROBE, read, tail

_INDEX_LIMIT = 256 << 20
_WRITE = 8 << 20
_BLOCK = 4096
_DIRECT = 1 << 20  # bytes from which on the page cache is passed by
_Listed = dict[str, tuple[Descriptor, set[str]]]  # by digest: the manifest and its tags


class LayoutRepository:
    """`budget_bytes` bounds the bytes of all blobs, more is errors.NoSpace. The folder is made when written to."""

    def __init__(self, path: Path, *, budget_bytes: int | None = None) -> None:
        self._path, self._budget = path, budget_bytes
        self._blobs, self._aside = path / "blobs" / "sha256", path / ".stasis" / "ingest"
        self._pushing: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def reference(self) -> Reference:
        return Reference(path=self._path)

    def _blob(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise Corrupt(f"{digest!r:.100} is no sha256 digest")
        return self._blobs / digest.removeprefix("sha256:")

    def stat(self, digest: str) -> int | None:
        try:
            return self._blob(digest).stat().st_size
        except FileNotFoundError:
            return None

    def push(self, descriptor: Descriptor, buffers: Sequence[Buffer]) -> bool:
        if self.stat(descriptor.digest) == descriptor.size:
            expected = tail(buffers, PROBE)
            if read(self, descriptor.digest, descriptor.size - len(expected), len(expected)) == expected:
                _sync_folder(self._blobs)  # whoever renamed it there may not have come to this yet
                return False
        self._make()
        with self._reserved(descriptor):
            self._write(self._blob(descriptor.digest), buffers)
        return True

    @contextmanager
    def _reserved(self, descriptor: Descriptor) -> Iterator[None]:
        with self._lock:
            if self._budget is not None:
                used = _size(self._blobs) + sum(self._pushing.values())
                if used + descriptor.size > self._budget:
                    raise NoSpace(
                        f"{self.reference}: {used} of {self._budget} bytes are used, {descriptor.size} more do not fit",
                        remedy="remove checkpoints or raise the disk budget",
                    )
            self._pushing[descriptor.digest] = descriptor.size
        try:
            yield
        finally:
            with self._lock:
                self._pushing.pop(descriptor.digest, None)

    def _write(self, path: Path, buffers: Sequence[Buffer]) -> None:
        aside = self._aside / secrets.token_hex(8)
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for buffer in buffers:
                    _write(fd, buffer)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(aside, path)
            _sync_folder(path.parent)
        except OSError as error:
            raise _store_error(error, self.reference) from error
        finally:
            aside.unlink(missing_ok=True)

    def open_blob(self, digest: str) -> int:
        """A descriptor to read a blob from; never of what a symlink leads to, or of anything but a file."""
        path = self._blob(digest)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{digest} is not in {self.reference}") from None
        except OSError as error:
            raise _store_error(error, self.reference) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Corrupt(f"{digest} in {self.reference} is no file")
        return fd

    def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        fd = self.open_blob(digest)
        try:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if not count:
                    wanted = offset + len(into)
                    raise Corrupt(f"{digest} in {self.reference} ends at byte {offset + done}, not at {wanted}")
                done += count
        except OSError as error:
            raise _store_error(error, self.reference) from error
        finally:
            os.close(fd)

    def put_manifest(self, body: bytes, media_type: str, tag: str = "") -> Descriptor:
        manifest = media.parse_manifest(body, "manifest")
        for child in manifest.needs:
            if self.stat(child.digest) != child.size:
                raise NotFound(f"{child.digest} is not in {self.reference}, so no manifest can name it")
        self.push(manifest.descriptor, [body])

        def add(listed: _Listed) -> None:
            for _, tags in listed.values():
                tags.discard(tag)
            listed.setdefault(manifest.descriptor.digest, (manifest.descriptor, set()))[1].update({tag} - {""})

        self._change_index(add)
        return manifest.descriptor

    def get_manifest(self, reference: str) -> Manifest:
        digest = reference
        if not DIGEST.fullmatch(reference):
            found = [digest for digest, (_, tags) in self._listed().items() if reference in tags]
            if not found:
                raise NotFound(f"no tag {reference} in {self.reference}")
            digest = found[0]
        size = self.stat(digest)
        if size is None and digest == reference:
            raise NotFound(f"manifest {digest} is not in {self.reference}")
        if size is None:
            raise Corrupt(f"manifest {digest} of tag {reference} is missing in {self.reference}")
        if size > media.MAX_MANIFEST:
            raise Corrupt(f"manifest {digest}: {size} bytes are too many")
        body = read(self, digest, 0, size)
        if media.digest_of(body) != digest:
            raise Corrupt(f"manifest {digest}: its bytes have another digest")
        return media.parse_manifest(body, f"manifest {digest}")

    def delete_manifest(self, digest: str) -> None:
        def remove(listed: _Listed) -> None:
            if listed.pop(digest, None) is None:
                raise NotFound(f"manifest {digest} is not in {self.reference}")

        self._change_index(remove)

    def tags(self) -> list[str]:
        return sorted({tag for _, tags in self._listed().values() for tag in tags})

    def sweep(self) -> int:
        """Does nothing while someone writes to the folder."""
        if not self._path.exists():
            return 0
        with self._locked("writers", fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
            if not alone:
                return 0
            needed: set[str] = set()
            for digest in self._listed():
                self._reach(digest, needed)
            freed = 0
            for path in [*self._blobs.iterdir(), *self._aside.iterdir()]:
                if path.parent == self._aside or f"sha256:{path.name}" not in needed:
                    freed += path.stat().st_size
                    path.unlink()
            return freed

    def _reach(self, digest: str, needed: set[str]) -> None:
        if digest in needed:
            return
        needed.add(digest)
        try:
            manifest = self.get_manifest(digest)
        except (NotFound, Corrupt):  # a broken checkpoint does not keep others from being removed
            return
        for child in manifest.needs:
            if child.media_type in (media.MANIFEST, media.IMAGE_INDEX):
                self._reach(child.digest, needed)
            else:
                needed.add(child.digest)

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._make()
        with self._locked("writers", fcntl.LOCK_SH):
            yield

    def _make(self) -> None:
        if (self._path / "oci-layout").exists() and self._aside.exists():
            return
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._blobs.parent, self._blobs, self._aside.parent, self._aside):
                folder.mkdir(mode=0o700, exist_ok=True)
            if not (self._path / "oci-layout").exists():
                self._write(self._path / "oci-layout", [b'{"imageLayoutVersion":"1.0.0"}'])
        except OSError as error:
            raise _store_error(error, self.reference) from error

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[bool]:
        """By flock, so for other processes too and gone with a crash; False if LOCK_NB found it taken."""
        fd = os.open(self._path / ".stasis" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, how)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(fd)

    def _listed(self) -> _Listed:
        where = f"index.json of {self.reference}"
        try:
            body = (self._path / "index.json").read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _store_error(error, self.reference) from error
        entries = media.parse_json(body, where, _INDEX_LIMIT).get("manifests")
        if not isinstance(entries, list):
            raise Corrupt(f"{where}: lists no manifests")
        listed: _Listed = {}
        for entry in entries:
            descriptor = Descriptor.from_dict(entry, where)
            notes = dict(descriptor.annotations)
            tag = notes.pop(media.REF_NAME, "")
            listed.setdefault(descriptor.digest, (replace(descriptor, annotations=notes), set()))[1].update(
                {tag} - {""}
            )
        return listed

    def _change_index(self, change: Callable[[_Listed], None]) -> None:
        self._make()
        with self._locked("index", fcntl.LOCK_EX):
            listed = self._listed()
            change(listed)
            manifests = [
                replace(descriptor, annotations={**descriptor.annotations, **({media.REF_NAME: tag} if tag else {})})
                for descriptor, tags in listed.values()
                for tag in sorted(tags) or [""]
            ]
            body = {"schemaVersion": 2, "mediaType": media.IMAGE_INDEX, "manifests": [m.as_dict() for m in manifests]}
            self._write(self._path / "index.json", [media.encode(body)])

    def close(self) -> None:
        """Nothing is kept open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _size(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)


def _write(fd: int, buffer: Buffer) -> None:
    """To the end of a file; whole blocks of memory that is aligned to them past the page cache, where the file system
    can: a pack is written once and read much later, and copying it into memory that nobody used yet costs more than the
    disk takes."""
    view, start = memoryview(buffer), os.lseek(fd, 0, os.SEEK_CUR)
    blocks = len(view) & -_BLOCK
    if blocks >= _DIRECT and not (start | np.frombuffer(view, np.uint8).ctypes.data) % _BLOCK:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            _write_out(fd, view[:blocks])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    _write_out(fd, view[os.lseek(fd, 0, os.SEEK_CUR) - start :])


def _write_out(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view[:_WRITE]) :]


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _store_error(error: OSError, where: Reference) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoSpace(f"{where} is full", remedy="free disk space")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Denied(f"{where}: {error.strerror} ({error.filename})")
    return StoreError(f"{where}: {error.strerror} ({error.filename})")
