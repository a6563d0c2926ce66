"""An agent gives back the memory that a checkpoint took: it is the node's."""

from collections.abc import Callable

import pytest
from tests.gang.lab import Lab
from tests.gang.test_growth import memory

pytestmark = [pytest.mark.root, pytest.mark.criu]
BALLAST = 128 << 20


def test_a_copy_of_the_pages_is_given_back(lab: Callable[..., Lab]) -> None:
    small = lab(pause=0.1)
    small.operator.checkpoint()
    before = memory()
    large = lab(env={"BALLAST": str(BALLAST)}, pause=0.1)
    large.operator.checkpoint()
    assert memory() - before < BALLAST
    for one in (small, large):
        one.progress()
        one.finish()
