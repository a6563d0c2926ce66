"""Whatever happens to a blob of a gang's checkpoint: `verify` and a resume refuse it by name, none of its processes
is started, and once the blob is whole again the gang goes on."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.gang.lab import Lab

from stasis.core.steps import Step
from stasis.errors import Corrupt
from stasis.store import media
from stasis.store.checkpoint import open_checkpoint, verify

pytestmark = [pytest.mark.root, pytest.mark.criu]

MakeLab = Callable[..., Lab]
DAMAGES = ["first", "middle", "last", "cut", "missing", "another"]


def blobs(where: str) -> list[tuple[str, str]]:
    """All that the checkpoint consists of, as kind and digest."""
    with open_checkpoint(where) as checkpoint:
        found = [("image index", checkpoint.digest)]
        for rank in checkpoint.ranks:
            found.append((f"manifest {rank.rank}", rank.digest))
            kinds = {media.RANK_CONFIG: "config", media.CHUNK_INDEX: "index", media.PACK: "pack"}
            found += [(f"{kinds[blob.media_type]} {rank.rank}", blob.digest) for blob in rank.blobs]
    return found


@contextmanager
def damaged(path: Path, how: str, other: bytes) -> Iterator[None]:
    data = path.read_bytes()
    at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}.get(how)
    if at is not None:
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else other)
    try:
        yield
    finally:
        path.write_bytes(data)


def some(found: list[tuple[str, str]]) -> list[tuple[tuple[str, str], str]]:
    """Each kind of blob once, of rank 1 where it is a rank's, and each damage at least once."""
    kinds = {name.split()[0]: (name, digest) for name, digest in found}
    return list(zip(kinds.values(), itertools.cycle(["last", "another", "middle", "missing", "first"]), strict=False))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_damaged_blob_is_refused_by_name_and_nothing_runs(lab: MakeLab, every: bool) -> None:
    one = lab()
    one.progress()
    files = one.suspend_into_placeholders()
    recorded: list[str] = []
    one.on_stage = recorded.append
    found = blobs(one.where)
    store = one.folder / "store/blobs"
    assert len(found) >= 9
    for (name, digest), how in itertools.product(found, DAMAGES) if every else some(found):
        path = store / digest.replace(":", "/")
        kind = name.split()[0]
        other = next((other for known, other in found if other != digest and known.split()[0] == kind), found[1][1])
        with damaged(path, how, (store / other.replace(":", "/")).read_bytes()):
            for action in (lambda: verify(one.where), one.operator.restore):
                with pytest.raises(Corrupt) as caught:
                    action()
                assert digest in str(caught.value), (name, how)
                assert caught.value.exit_code == 9
        assert one.not_waiting(files) == [], (name, how)
    assert Step.RESTORE not in recorded  # CRIU was not started, in no rank
    one.operator.restore()
    one.progress()
    one.finish()
    assert verify(one.where) > 0


def test_a_tag_that_names_what_was_not_committed_is_refused(lab: MakeLab) -> None:
    """Whoever can write to the store cannot have other ranks restored than those that were checkpointed."""
    one = lab()
    one.progress()
    one.operator.checkpoint()
    with open_checkpoint(one.where) as checkpoint:
        mine = {rank.rank: rank.digest for rank in checkpoint.ranks}
        rank = checkpoint.repository.get_manifest(mine[1])
        body = json.loads(rank.body)
        body["annotations"]["forged"] = "yes"
        manifest = checkpoint.repository.put_manifest(json.dumps(body).encode(), media.MANIFEST)
        index = json.loads(checkpoint.repository.get_manifest(checkpoint.digest).body)
        index["manifests"][1] |= {"digest": manifest.digest, "size": manifest.size}
        checkpoint.repository.put_manifest(json.dumps(index).encode(), media.IMAGE_INDEX, "test")
    with pytest.raises(Corrupt, match=manifest.digest):
        one.operator.resume()
    one.progress()  # not even its containers were deleted
    one.finish()
