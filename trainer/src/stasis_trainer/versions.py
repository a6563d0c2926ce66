"""The versions of torch whose process groups were tested. Others are left alone: a guess would risk the training."""

from __future__ import annotations

import re

TESTED = ("2.6", "2.14")


def refusal(version: str) -> str | None:
    """Why groups of this torch are not touched; None where they are."""
    match = re.match(r"(\d+\.\d+)\.", version)
    if match and match[1] in TESTED:
        return None
    return f"torch {version} is not among the versions tested: {', '.join(TESTED)}"
