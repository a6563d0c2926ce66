"""Read and write CRIU's image files, with the message types that the CRIU bundle itself describes (`images.desc`).

    IMAGE ::= MAGIC [MAGIC] { ENTRY }        ENTRY ::= u32 SIZE, protobuf message of SIZE bytes [EXTRA]

EXTRA is raw data whose length the message tells (queues of sockets and pipes, contents of unlinked files). Fields that
this CRIU does not know are kept, so `dump(load(x)) == x` for every image. The bytes are another party's: lengths are
checked against what is there, and anything that does not fit is `Corrupt`, naming the image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from stasis.errors import Corrupt, Unsupported

_COMMON = 0x54564319  # images of a dump
_SERVICE = 0x55105940  # statistics and caches
_U32 = 4


@dataclass
class Entry:
    message: Any  # a protobuf message; its class is made at run time
    extra: bytes = b""


@dataclass
class Image:
    kind: str  # as `crit` names it: FILES, TCP_STREAM, ...
    entries: list[Entry] = field(default_factory=list)

    @property
    def messages(self) -> list[Any]:
        return [entry.message for entry in self.entries]


@dataclass(frozen=True)
class _Kind:
    magic: int
    message: str
    extra: Callable[[Any], int] | None = None
    prefix: int | None = _COMMON


_KINDS: dict[str, _Kind] = {
    "INVENTORY": _Kind(0x58313116, "inventory_entry", prefix=None),
    "PSTREE": _Kind(0x50273030, "pstree_entry"),
    "FDINFO": _Kind(0x56213732, "fdinfo_entry"),
    "PAGEMAP": _Kind(0x56084025, "pagemap_entry"),
    "CORE": _Kind(0x55053847, "core_entry"),
    "IDS": _Kind(0x54432030, "task_kobj_ids_entry"),
    "PIPES": _Kind(0x56513555, "pipe_entry"),
    "PIPES_DATA": _Kind(0x56453709, "pipe_data_entry", lambda m: int(m.bytes)),
    "FIFO": _Kind(0x58364939, "fifo_entry"),
    "FIFO_DATA": _Kind(0x59333054, "pipe_data_entry", lambda m: int(m.bytes)),
    "UNIXSK": _Kind(0x54373943, "unix_sk_entry"),
    "INETSK": _Kind(0x56443851, "inet_sk_entry"),
    "PACKETSK": _Kind(0x60454618, "packet_sock_entry"),
    "SK_QUEUES": _Kind(0x56264026, "sk_packet_entry", lambda m: int(m.length)),
    "UTSNS": _Kind(0x54473203, "utsns_entry"),
    "CREDS": _Kind(0x54023547, "creds_entry"),
    "REG_FILES": _Kind(0x50363636, "reg_file_entry"),
    "EXT_FILES": _Kind(0x59255641, "ext_file_entry"),
    "FS": _Kind(0x51403912, "fs_entry"),
    "MM": _Kind(0x57492820, "mm_entry"),
    "REMAP_FPATH": _Kind(0x59133954, "remap_file_path_entry"),
    "GHOST_FILE": _Kind(0x52583605, "ghost_file_entry"),
    "TCP_STREAM": _Kind(0x51465506, "tcp_stream_entry", lambda m: int(m.inq_len) + int(m.outq_len)),
    "EVENTFD_FILE": _Kind(0x44523722, "eventfd_file_entry"),
    "EVENTPOLL_FILE": _Kind(0x45023858, "eventpoll_file_entry"),
    "EVENTPOLL_TFD": _Kind(0x44433746, "eventpoll_tfd_entry"),
    "SIGNALFD": _Kind(0x57323820, "signalfd_entry"),
    "INOTIFY_FILE": _Kind(0x48424431, "inotify_file_entry"),
    "INOTIFY_WD": _Kind(0x54562009, "inotify_wd_entry"),
    "FANOTIFY_FILE": _Kind(0x55096122, "fanotify_file_entry"),
    "FANOTIFY_MARK": _Kind(0x56506035, "fanotify_mark_entry"),
    "MNTS": _Kind(0x55563928, "mnt_entry"),
    "NETDEV": _Kind(0x57373951, "net_device_entry"),
    "NETNS": _Kind(0x55933752, "netns_entry"),
    "TTY_FILES": _Kind(0x59433025, "tty_file_entry"),
    "TTY_INFO": _Kind(0x59453036, "tty_info_entry"),
    "TTY_DATA": _Kind(0x59413026, "tty_data_entry"),
    "FILE_LOCKS": _Kind(0x54323616, "file_lock_entry"),
    "NETLINK_SK": _Kind(0x58005614, "netlink_sk_entry"),
    "NS_FILES": _Kind(0x61394011, "ns_file_entry"),
    "TUNFILE": _Kind(0x57143751, "tunfile_entry"),
    "CGROUP": _Kind(0x59383330, "cgroup_entry"),
    "TIMERFD": _Kind(0x50493712, "timerfd_entry"),
    "CPUINFO": _Kind(0x61404013, "cpuinfo_entry"),
    "USERNS": _Kind(0x55474906, "userns_entry"),
    "SECCOMP": _Kind(0x64413049, "seccomp_entry"),
    "FILES": _Kind(0x56303138, "file_entry"),
    "MEMFD_INODE": _Kind(0x48453499, "memfd_inode_entry"),
    "TIMENS": _Kind(0x43114433, "timens_entry"),
    "PIDNS": _Kind(0x61157326, "pidns_entry"),
    "APPARMOR": _Kind(0x59423047, "apparmor_entry"),
    "PIDFD": _Kind(0x54435556, "pidfd_entry"),
    "STATS": _Kind(0x57093306, "stats_entry", prefix=_SERVICE),
}
_BY_MAGIC = {kind.magic: name for name, kind in _KINDS.items()}


class ImageCodec:
    """The images of one CRIU bundle. `descriptors` is the bundle's `images.desc` (a FileDescriptorSet)."""

    def __init__(self, descriptors: Path) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file:
            self._pool.Add(file)
        self._types: dict[str, Any] = {}

    def type(self, name: str) -> Any:
        """The class of a message, by its name in CRIU's .proto files, for example "tcp_stream_entry"."""
        if name not in self._types:
            self._types[name] = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))
        return self._types[name]

    def load(self, name: str, data: bytes) -> Image:
        """Decode the image called `name` (the name is for messages only; its magic says what it is).

        Raises Corrupt when the bytes are no such image, Unsupported when they are an image of an unknown kind.
        """
        kind_name, offset = _magic(name, data)
        image, kind = Image(kind_name), _KINDS[kind_name]
        message_type = kind.message
        if kind_name == "PAGEMAP":
            message_type = "pagemap_head"
        while offset < len(data):
            message, offset = self._message(name, data, offset, message_type)
            if kind_name == "PAGEMAP":
                message_type = "pagemap_entry"
            size = kind.extra(message) if kind.extra else 0
            if kind_name == "GHOST_FILE":
                # The contents follow: as a whole, or (sparse files) in chunks, each with an entry of its own.
                if message_type == "ghost_chunk_entry":
                    size = int(message.len)
                elif message.chunks:
                    message_type = "ghost_chunk_entry"
                else:
                    size = len(data) - offset
            if size > len(data) - offset:
                raise Corrupt(f"{name}: {size} bytes should follow at offset {offset}, {len(data) - offset} are there")
            image.entries.append(Entry(message, data[offset : offset + size]))
            offset += size
        return image

    def dump(self, image: Image) -> bytes:
        """Encode an image; the caller has set the lengths in the messages to those of the extra data."""
        kind = _KINDS[image.kind]
        head = [] if kind.prefix is None else [kind.prefix]
        parts = [magic.to_bytes(_U32, "little") for magic in (*head, kind.magic)]
        for entry in image.entries:
            message = entry.message.SerializeToString()
            parts += [len(message).to_bytes(_U32, "little"), message, entry.extra]
        return b"".join(parts)

    def _message(self, name: str, data: bytes, offset: int, message_type: str) -> tuple[Any, int]:
        start = offset + _U32
        end = start + int.from_bytes(data[offset:start], "little")
        if start > len(data) or end > len(data):
            raise Corrupt(f"{name}: the entry at offset {offset} does not end within the image's {len(data)} bytes")
        try:
            return self.type(message_type).FromString(data[start:end]), end
        except DecodeError:
            raise Corrupt(f"{name}: no {message_type} at offset {offset}") from None


def _magic(name: str, data: bytes) -> tuple[str, int]:
    first, second = (int.from_bytes(data[at : at + _U32], "little") for at in (0, _U32))
    magic, offset = (second, 2 * _U32) if first in (_COMMON, _SERVICE) else (first, _U32)
    if len(data) < offset:
        raise Corrupt(f"{name}: too short for a CRIU image ({len(data)} bytes)")
    kind = _BY_MAGIC.get(magic)
    if kind is None:
        raise Unsupported(f"{name}: a CRIU image of an unknown kind (magic {magic:#010x})")
    return kind, offset
