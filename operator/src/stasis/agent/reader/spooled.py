"""A registry whose packs, once they were fetched, are read from a file of this machine."""

from __future__ import annotations

from stasis.store.prefetch import Spool
from stasis.store.registry import RegistryRepository


class SpooledRegistry(RegistryRepository):
    spool: Spool | None = None  # holds whole packs, or all that anybody will read of them

    def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        if self.spool and digest in self.spool:
            self.spool.read_into(digest, offset, into)
        else:
            super().read_into(digest, offset, into)
