"""An invariant that catches no planted bug checks nothing."""

from __future__ import annotations

import pytest
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.simulation import Simulation

SCHEDULES = 3000


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_planted_bug_is_caught(mutant: Mutant) -> None:
    for seed in range(SCHEDULES):
        setting = mutant.setting() if mutant.setting else None
        violation = Simulation(seed, setting, plants=mutant.plants).run().violation
        if violation and violation.name in mutant.caught_by:
            return
    pytest.fail(f"{mutant.name}: not caught by {mutant.caught_by} in {SCHEDULES} schedules")
