"""A checkpoint of one rank as a restore reads it, small: images of CRIU's formats, pages, files of an area."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from stasis.agent.criu_images import Entry, Image, ImageCodec
from stasis.core.connections import Fix
from stasis.core.rankconfig import AREA_PREFIX, IMAGE_PREFIX, RankConfig
from stasis.store.repository import Repository
from stasis.store.writer import RankWriter

MIB = 1 << 20
CAPABILITIES = 0x1F00000000F
CONFIG = RankConfig(
    uid="uid", rank=3, world_size=4, root=7, threads=2, last_pid=8, hostname="node-3", init="/stasis/x/init",
    fixes={str(0xAB): asdict(Fix(cut=3, outq_len=5))},
)  # fmt: skip


def filled(message: Any) -> Any:
    """With every field that its type requires."""
    for field in message.DESCRIPTOR.fields:
        if field.is_required and not message.HasField(field.name):
            if field.message_type:
                getattr(message, field.name).SetInParent()
            else:
                setattr(message, field.name, field.default_value)
        if field.message_type and not field.is_repeated and message.HasField(field.name):
            filled(getattr(message, field.name))
    return message


def images(codec: ImageCodec) -> dict[str, bytes]:
    def image(kind: str, *messages: Any, extra: bytes = b"") -> bytes:
        return codec.dump(Image(kind, [Entry(filled(message), extra) for message in messages]))

    creds = {"uid": 1000, "euid": 1000, "cap_prm": [0xF, 0x1F0], "groups": [5, 6], "no_new_privs": 1}
    core = codec.type("core_entry")(tc={"comm": "python"}, thread_core={"creds": creds, "seccomp_mode": 2, "comm": "t"})
    core.thread_core.seccomp_filter = 1
    seccomp = codec.type("seccomp_entry")(seccomp_filters=[{"filter": b"first"}, {"filter": b"second"}])
    seccomp.seccomp_filters[1].prev = 0
    log = codec.type("file_entry")(type="REG", id=1, reg={"id": 1, "name": "/data/log", "size": 7})
    code = codec.type("file_entry")(type="REG", id=2, reg={"id": 2, "name": "/code/x", "size": 8})
    socket = {"ino": 9, "family": 2, "type": 1, "proto": 6, "state": 10, "src_port": 4000, "src_addr": [0x0100000A]}
    listener = codec.type("file_entry")(type="INETSK", id=3, isk=socket)
    queue = codec.type("tcp_stream_entry")(inq_len=4, outq_len=8, unsq_len=2)
    return {
        "pstree.img": image("PSTREE", codec.type("pstree_entry")(pid=7, threads=[7, 8])),
        "core-7.img": image("CORE", core),
        "core-8.img": image("CORE", core),
        "seccomp.img": image("SECCOMP", seccomp),
        "files.img": image("FILES", log, code, listener),
        "tcp-stream-ab.img": image("TCP_STREAM", queue, extra=b"readsentsend"),
        "pages-1.img": np.random.default_rng(1).bytes(40 * MIB + 77),
        "pages-2.img": bytes(3 * MIB) + np.random.default_rng(2).bytes(9 * MIB),
    }


def streams(codec: ImageCodec) -> dict[str, bytes]:
    found = {IMAGE_PREFIX + name: data for name, data in images(codec).items()}
    return found | {AREA_PREFIX + "shm": np.random.default_rng(3).bytes(20 * MIB)}


def write(repository: Repository, content: dict[str, bytes], config: dict[str, Any] | None = None) -> str:
    """The digest of the rank's manifest."""
    writer = RankWriter(repository, uid="uid", rank=3)
    for name, data in content.items():
        writer.put(name, data)
    return writer.finish(CONFIG.to_dict() if config is None else config).manifest.digest
