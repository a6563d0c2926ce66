"""CRIU's images of a rank, read whole and prepared for the container that they are restored into."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from stasis.agent import credentials
from stasis.agent.criu_images import ImageCodec
from stasis.agent.network import images
from stasis.agent.network.translate import Bound
from stasis.agent.stream import write_all
from stasis.core.connections import Fix
from stasis.core.credentials import Credentials
from stasis.core.rankconfig import IMAGE_PREFIX, RankConfig
from stasis.errors import Corrupt
from stasis.store.reader import RankReader

SMALL_IMAGE = 64 << 20  # images up to this size are read whole, changed where they must be, and served from memory
ALL_SMALL = 1 << 30  # of all of them
LARGE_IMAGES = ("pages-", "ghost-file-")  # whatever their size


class Prepared:
    """All images of a rank: what is looked at before the restore is what CRIU gets. Raises Corrupt, and what Python
    raises where the images are not of the kinds that their names say.

    `volumes` are the container's mount points whose files are not in the checkpoint: they may have grown since.
    """

    def __init__(self, reader: RankReader, codec: ImageCodec, config: RankConfig, volumes: Collection[str]) -> None:
        self._reader = reader
        self._codec = codec
        self.names = [n.removeprefix(IMAGE_PREFIX) for n in reader.names() if n.startswith(IMAGE_PREFIX)]
        small = [name for name in self.names if self._is_small(name)]
        if sum(map(self._size, small)) > ALL_SMALL:
            raise Corrupt(f"the images of rank {reader.rank}, without its pages, have more than {ALL_SMALL} bytes")
        self._data = {name: reader.read(IMAGE_PREFIX + name, SMALL_IMAGE) for name in small}
        self._mend(config)
        self._data["files.img"] = self._without_sizes(self._image("files.img"), volumes)

    def tasks(self) -> list[Credentials]:
        """Of every thread that will run."""
        return credentials.of_images(self._codec, self._data)

    def bound(self) -> list[Bound]:
        """The sockets that wait at an address of their own."""
        return images.bound(self._codec, self._image)

    def source(self, name: str) -> Callable[[int], None]:
        """Writes an image into a pipe or file."""
        if name in self._data:
            return lambda fd: write_all(fd, self._data[name])
        return partial(self._reader.copy_to, IMAGE_PREFIX + name)

    def _is_small(self, name: str) -> bool:
        return self._size(name) <= SMALL_IMAGE and not name.startswith(LARGE_IMAGES)

    def _size(self, name: str) -> int:
        return self._reader.size(IMAGE_PREFIX + name)

    def _image(self, name: str) -> bytes:
        if name not in self._data:
            raise Corrupt(f"rank {self._reader.rank} has no image {name}, or one of more than {SMALL_IMAGE} bytes")
        return self._data[name]

    def _mend(self, config: RankConfig) -> None:
        for inode, fix in config.fixes.items():
            name = images.queues(int(inode))
            self._data[name] = images.apply(self._codec, self._image(name), Fix(**fix))

    def _without_sizes(self, data: bytes, volumes: Collection[str]) -> bytes:
        below = tuple(point.rstrip("/") + "/" for point in volumes)
        image = self._codec.load("files.img", data)
        for item in image.messages:
            if item.HasField("reg") and item.reg.name.startswith(below):
                item.reg.ClearField("size")
        return self._codec.dump(image)
