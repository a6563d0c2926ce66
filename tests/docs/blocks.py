"""The shell blocks of the documentation, with what is said of them: `<!-- run -->` or `<!-- not run: why -->`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"<!-- (run|not run: .+) -->")


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its fence
    language: str
    mark: str  # empty where there is none
    text: str

    @property
    def runs(self) -> bool:
        return self.mark == "run"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    lines = path.read_text().splitlines()
    number = 0
    while number < len(lines):
        if not (fence := _FENCE.match(lines[number])):
            number += 1
            continue
        before = next((line for line in reversed(lines[:number]) if line.strip()), "")
        mark = _MARK.fullmatch(before.strip())
        end = lines.index("```", number + 1)
        text = "\n".join(lines[number + 1 : end]) + "\n"
        yield Block(str(path.relative_to(ROOT)), number + 1, fence[1], mark[1] if mark else "", text)
        number = end + 1


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def runnable(page: str) -> list[Block]:
    """Those of a page that a test runs against a cluster, in order, from the repository's root."""
    return [block for block in all_blocks() if block.page == page and block.runs]
