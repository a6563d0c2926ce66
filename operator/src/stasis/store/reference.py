"""References: where a checkpoint is.

`oci:PATH[:TAG|@DIGEST]` or anything that begins with `/`, `./`, `../` or `~/` names an OCI image-layout folder;
`HOST[:PORT]/NAME[:TAG|@DIGEST]` names a repository of a registry, its host recognised as Docker does (a dot, a port,
or `localhost`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from stasis.errors import UsageError

TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?")
_PATH_LIKE = ("/", "./", "../", "~/")


@dataclass(frozen=True)
class Reference:
    """Either `path` (a folder) or `host` and `name` (a registry) is set; at most one of `tag` and `digest`."""

    path: Path | None = None
    host: str = ""
    name: str = ""
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str | Reference) -> Reference:
        """Raises UsageError for what is neither a folder nor a repository."""
        if isinstance(text, Reference):
            return text
        if text.startswith("oci:"):
            return cls._folder(text, text.removeprefix("oci:"))
        if text in (".", "..") or text.startswith(_PATH_LIKE):
            return cls._folder(text, text)
        host, slash, rest = text.partition("/")
        if not slash or not ("." in host or ":" in host or host == "localhost"):
            raise UsageError(
                f"{text!r} names neither a folder nor a registry",
                remedy="write oci:PATH or ./PATH for a folder, HOST/NAME for a registry",
            )
        name, tag, digest = _split(text, rest)
        if not _HOST.fullmatch(host) or not _NAME.fullmatch(name) or len(name) > 255:
            raise UsageError(f"{text!r} is no valid HOST[:PORT]/NAME[:TAG|@DIGEST]")
        return cls(host=host, name=name, tag=tag, digest=digest)

    @classmethod
    def _folder(cls, text: str, rest: str) -> Reference:
        path, tag, digest = _split(text, rest)
        if not path or "\0" in path:
            raise UsageError(f"{text!r} names no folder")
        return cls(path=Path(path).expanduser().absolute(), tag=tag, digest=digest)

    @property
    def repository(self) -> Reference:
        """The same place without tag and digest."""
        return replace(self, tag="", digest="")

    def at(self, *, tag: str = "", digest: str = "") -> Reference:
        return replace(self, tag=tag, digest=digest)

    def __str__(self) -> str:
        where = f"oci:{self.path}" if self.path is not None else f"{self.host}/{self.name}"
        return where + (f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else "")


def _split(text: str, rest: str) -> tuple[str, str, str]:
    """(name or path, tag, digest)"""
    where, at, digest = rest.partition("@")
    if at:
        if not DIGEST.fullmatch(digest):
            raise UsageError(f"{text!r}: {digest!r} is no sha256 digest")
        return where, "", digest
    head, colon, tag = rest.rpartition(":")
    if colon and "/" not in tag:
        if not TAG.fullmatch(tag):
            raise UsageError(f"{text!r}: {tag!r} is no valid tag")
        return head, tag, ""
    return rest, "", ""
