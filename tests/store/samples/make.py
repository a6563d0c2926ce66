"""Made samples/v1, and makes the sample of a new version of the format: python make.py FOLDER. A sample that was
committed is never made again: later versions have to read what an earlier one wrote."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from stasis.store.checkpoint import publish
from stasis.store.layout import LayoutRepository
from stasis.store.reader import RankReader
from stasis.store.writer import RankWriter

PAGE = 4096


def streams(step: int, rank: int) -> dict[str, bytes]:
    rng = np.random.default_rng(rank)
    fp32 = rng.integers(-2000, 2000, 70 * 1024).astype(np.float32) / 7
    fp32 = (fp32.view(np.uint32) & 0xFFFFF000).view(np.float32)
    bf16 = (np.abs(rng.standard_normal(140 * 1024)).astype(np.float32).view(np.uint32) >> 16 & 0xFFF8).astype(np.uint16)
    text = b"".join(b"step %d of rank %d\n" % (n, rank) for n in range(3000))
    own = np.random.default_rng(100 + step).bytes(9 * PAGE)
    return {
        "inventory.img": b"inventory %d" % rank,
        "pages-1.img": bytes(24 * PAGE) + fp32.tobytes() + bytes(PAGE) + own + bytes(3 * PAGE),
        "pages-2.img": own[: 2 * PAGE] + bf16.tobytes() + b"\0" * 100,
        "log": text + b"%d" % step,
        "empty": b"",
    }


def make(folder: Path) -> None:
    repo = LayoutRepository(folder)
    expected, parents = {}, {}
    for step in (1, 2):
        manifests = []
        for rank in (0, 1):
            writer = RankWriter(repo, uid=f"sample-{step}", rank=rank, parent=parents.get(rank))
            for name, data in streams(step, rank).items():
                writer.put(name, data)
                expected[f"{step}/{rank}/{name}"] = [len(data), hashlib.sha256(data).hexdigest()]
            manifests.append(writer.finish({"step": step, "rank": rank}).manifest)
            parents[rank] = RankReader(repo, manifests[-1])
        publish(repo, f"step-{step}", f"sample-{step}", manifests, {"step": step})
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
