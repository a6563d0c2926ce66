"""The server's certificate: a folder as a Secret is mounted, read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

_LOOK = 2.0  # seconds
log = logging.getLogger(__name__)


class Certificate:
    """`context` serves with the last usable certificate of the folder."""

    def __init__(self, folder: Path) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.loaded = False
        self._files = (folder / "tls.crt", folder / "tls.key")
        self._seen: tuple[bytes, ...] = ()

    def look(self) -> None:
        """Load what is new. What cannot be used is passed over: the files may be about to change together."""
        try:
            found = tuple(path.read_bytes() for path in self._files)
            if found == self._seen:
                return
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):  # the first one to try
                context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            log.warning("no usable certificate", extra={"folder": str(self._files[0].parent), "error": str(error)})
            return
        self._seen, self.loaded = found, True
        log.info("certificate loaded", extra={"folder": str(self._files[0].parent)})

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_LOOK)
