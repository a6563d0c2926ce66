"""The codec of CRIU's images, on the images of a real dump."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from tests.network.lab import Bridge, Pod, eventually

from stasis.agent.criu_images import ImageCodec
from stasis.errors import Corrupt, Unsupported

PROGRAM = """
import os, signal, socket, tempfile, threading, time
pipe = os.pipe()
os.write(pipe[1], b"in the pipe" * 100)
pair = socket.socketpair()
pair[0].send(b"in the socket" * 100)
gone = tempfile.TemporaryFile()
gone.write(b"unlinked" * 1000)
gone.flush()
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
served = listener.accept()[0]
client.send(b"unread")
timer = signal.setitimer(signal.ITIMER_REAL, 1000)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("images")
    switch = Bridge()
    try:
        pod = Pod(switch, ["10.99.0.1"])
        try:
            pod.start(sys.executable, "-c", PROGRAM, log=folder / "log")
            eventually(lambda: (folder / "log").read_text() == "ready\n", "the program is ready")
            pod.set_frozen(True)
            pod.dump(folder / "dump")
        finally:
            pod.close()
    finally:
        switch.close()
    found = {path.name: path.read_bytes() for path in (folder / "dump").glob("*.img")}
    return {name: data for name, data in found.items() if not name.startswith("pages-")}


@pytest.mark.root
@pytest.mark.criu
def test_every_image_is_encoded_as_it_was_read(images: dict[str, bytes], codec: ImageCodec) -> None:
    assert {"files.img", "pstree.img", "inventory.img"} <= set(images)
    assert {"pipes-data.img", "sk-queues.img"} <= set(images)
    assert any(name.startswith("tcp-stream-") for name in images)
    assert any(name.startswith("ghost-file-") for name in images)
    for name, data in images.items():
        assert codec.dump(codec.load(name, data)) == data, name


@pytest.mark.root
@pytest.mark.criu
def test_contents_that_follow_a_message_are_read_with_it(images: dict[str, bytes], codec: ImageCodec) -> None:
    def extras(prefix: str) -> bytes:
        return b"".join(e.extra for n in images if n.startswith(prefix) for e in codec.load(n, images[n]).entries)

    assert extras("pipes-data") == b"in the pipe" * 100
    assert extras("sk-queues") == b"in the socket" * 100
    assert extras("ghost-file") == b"unlinked" * 1000
    assert extras("tcp-stream") == b"unread"


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:6], lambda d: d[:8] + b"\xff" * 4 + d[12:]])
def test_a_damaged_image_is_named(
    images: dict[str, bytes], codec: ImageCodec, damage: Callable[[bytes], bytes]
) -> None:
    for name in ("files.img", "pstree.img", "pipes-data.img"):
        with pytest.raises(Corrupt, match=name):
            codec.load(name, damage(images[name]))


def test_what_is_no_known_image_is_refused(codec: ImageCodec) -> None:
    with pytest.raises(Unsupported, match=r"strange\.img"):
        codec.load("strange.img", bytes(100))
