"""A reader that foreign bytes took over, or that hangs: the agent believes nothing, waits for ever for nothing."""

from __future__ import annotations

import json
import os
import struct
import threading
from dataclasses import asdict
from typing import Any

import pytest
from tests.reader.checkpoint import CONFIG
from tests.reader.conftest import StartReader, until

from stasis.agent.reader import client, process
from stasis.core.credentials import Credentials
from stasis.errors import Corrupt, RestoreFailed, StasisError, Unsupported

pytestmark = pytest.mark.root

# Answers each call with the bytes given, and then with nothing more.
HOSTILE = """
import os, socket, struct, sys, time
control = socket.socket(fileno=int(sys.argv[2]))
def exactly(count):
    data = b""
    while len(data) < count: data += control.recv(count - len(data))
    return data
exactly(struct.unpack("<I", exactly(4))[0])
kept = []
for answer in {answers!r}:
    head, fds, _, _ = socket.recv_fds(control, 4, 4)
    exactly(struct.unpack("<I", head)[0])
    kept.append(fds)
    if answer is None: os._exit(3)
    os.write(fds[0], answer)
time.sleep(600)
"""


def framed(message: object) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


GOOD = framed({"config": CONFIG.to_dict()})


@pytest.fixture
def hostile(start: StartReader, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*answers: bytes | None, seconds: float = 20.0) -> client.Reader:
        monkeypatch.setattr(process, "BOOT", HOSTILE.format(answers=list(answers)))
        return start(("/nowhere", "sha256:" + "0" * 64), seconds=seconds)

    return make


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 3) + b"{x}",
        framed([]),
        framed({}),
        framed({"config": 5}),
        framed({"error": 7}),
        framed({"error": ["Corrupt", 5, ""]}),
        framed("[" * 20_000),
        struct.pack("<I", 20_000) + b"[" * 20_000,
        None,
    ],
)
def test_nonsense_for_a_config(hostile: Any, answer: bytes | None) -> None:
    reader = hostile(answer)
    with pytest.raises(RestoreFailed, match="the reader of the checkpoint"):
        reader.config()
    assert until(lambda: not reader.alive)
    with pytest.raises(RestoreFailed):
        reader.config()


def test_a_config_that_is_none(hostile: Any) -> None:
    for config, kind in (({}, Unsupported), ({**CONFIG.to_dict(), "rank": "3"}, Corrupt)):
        with pytest.raises(kind):
            hostile(framed({"config": config})).config()


@pytest.mark.parametrize("name", ["SystemExit", "Finding", "Refused", "annotations", "Sequence", "StasisError"])
def test_errors_of_any_name_are_errors_of_ours(hostile: Any, name: str) -> None:
    with pytest.raises(StasisError, match="a text") as caught:
        hostile(framed({"error": [name, "a text", "a remedy"]})).config()
    assert type(caught.value) in (RestoreFailed, StasisError)
    assert caught.value.remedy == "a remedy"


TASK = asdict(Credentials(1, "x", (0, 0, 0, 0), (0, 0, 0, 0))) | {"filters": 0}
IMAGES: dict[str, Any] = {"images": ["core-1.img"], "chains": [[]], "tasks": [TASK], "bound": [], "packed": 7}


@pytest.mark.parametrize(
    ("part", "value", "kind"),
    [
        ("images", ["../../etc/cron.d/x"], Corrupt),
        ("images", [".."], Corrupt),
        ("images", [5], Corrupt),
        ("images", None, RestoreFailed),
        ("chains", [["?"]], RestoreFailed),
        ("tasks", [{**TASK, "uids": "0000"}], RestoreFailed),
        ("tasks", [{**TASK, "permitted": -1}], RestoreFailed),
        ("tasks", [{**TASK, "no_new_privs": 1}], RestoreFailed),
        ("tasks", [{**TASK, "filters": 7}], RestoreFailed),
        ("tasks", [{**TASK, "more": 7}], RestoreFailed),
        ("tasks", [5], RestoreFailed),
        ("bound", [["tcp", "no address", 5]], RestoreFailed),
        ("bound", [["tcp", "10.0.0.1", 70000]], RestoreFailed),
        ("bound", [["sctp", "10.0.0.1", 7]], RestoreFailed),
        ("bound", [[]], RestoreFailed),
        ("packed", -1, RestoreFailed),
        ("packed", "7", RestoreFailed),
    ],
)
def test_nonsense_for_images(hostile: Any, part: str, value: object, kind: type[StasisError]) -> None:
    reader = hostile(GOOD, framed({**IMAGES, part: value}))
    reader.config()
    with pytest.raises(kind):
        reader.prepare([])


def test_what_makes_sense_is_taken(hostile: Any) -> None:
    reader = hostile(GOOD, framed(IMAGES))
    assert reader.config() == CONFIG
    described = reader.prepare([])
    assert described.images == ("core-1.img",)
    assert described.tasks[0].uids == (0, 0, 0, 0)


@pytest.mark.parametrize("trickle", [b"", GOOD[:100]])
def test_a_reader_that_hangs_is_killed(hostile: Any, trickle: bytes) -> None:
    reader = hostile(trickle, seconds=1.0)
    with pytest.raises(RestoreFailed, match=r"took longer than 1\.0 s to open the checkpoint"):
        reader.config()
    assert until(lambda: not reader.alive)


def test_who_waits_for_it_goes_on_when_it_is_given_up(hostile: Any) -> None:
    reader = hostile(b"", seconds=200)
    read, write = os.pipe()
    call = reader.start("files/shm", write)
    os.close(write)
    threading.Timer(0.2, reader.kill).start()
    assert os.read(read, 1) == b""  # the end of the stream: nobody writes any more
    with pytest.raises(RestoreFailed, match="ended when it was to read files/shm"):
        call.wait()
    os.close(read)
