"""What distinguishes one schedule from another before it begins."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.sim.program import PROGRAMS

from stasis.core.plan import Timing
from stasis.core.records import Verdict
from stasis.core.steps import Step

FAULTS = {
    "crash-leader": 6,
    "second-leader": 4,
    "stall-leader": 3,
    "crash-agent": 8,
    "stall-agent": 3,
    "kill-guardian": 4,
    "kill-both": 2,
    "crash-node": 2,
    "cut": 3,
    "store-down": 3,
    "jump": 3,
    "exit": 2,
    "withdraw": 4,
    "delete": 1,
    "fuse": 6,
}
TRIGGERS: tuple[str, ...] = (*map(str, Step), *map(str, Verdict))


def timing(frozen: float = 60.0, step: float = 10.0) -> Timing:
    return Timing(
        prepared=60,
        frozen=frozen,
        storing=120,
        margin=3,
        resend=1,
        poll=3,
        retry=1,
        step=step,
        limits={Step.UNLOCK_NETWORK: 10, Step.THAW: 10},
        lease=15,
        takeover=10,
    )


@dataclass
class Setting:
    """A gang, its program, and how bad its world is. Rates are probabilities, times are seconds."""

    size: int = 2
    program: str = "SR"
    devices: bool = False
    timing: Timing = field(default_factory=timing)
    loss: float = 0.0  # of a message
    double: float = 0.0
    delay: float = 0.01  # of a message, at most
    fail: float = 0.0  # of a step
    hang: float = 0.0
    store: float = 0.0  # that a call of the store fails
    faults: dict[int, str] = field(default_factory=dict)  # after this many events
    triggers: dict[str, list[str]] = field(default_factory=dict)  # when a step begins, a record is written
    calm: int = 0  # the event after which nothing bad happens any more
    refuse: str = ""  # the caller refuses after this step
    fuse: tuple[str, int] | None = None  # this process dies instead of having this effect
    drop: int | None = None  # this message is lost
    double_late: int | None = None  # this message comes again after this many more

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        size = rng.choice((1, 2, 2, 2, 3, 3, 4))
        program = rng.choice(PROGRAMS)
        setting = cls(size, program, rng.random() < 0.4, timing(rng.choice((30, 60, 200)), rng.choice((10, 10, 80))))
        kinds, weights = list(FAULTS), list(FAULTS.values())
        mood = rng.random()
        if mood < 0.1:
            return setting
        if mood < 0.4:  # only a few faults, at telling moments
            setting.loss, setting.store, setting.delay = rng.choice((0.0, 0.2)), rng.choice((0.0, 0.3)), 1.0
            for _ in range(rng.choice((2, 3, 4))):
                setting.triggers.setdefault(rng.choice(TRIGGERS), []).append(rng.choice(kinds))
            setting.calm = 400 * size * len(program)
            return setting
        setting.loss = rng.choice((0.0, 0.0, 0.05, 0.25))
        setting.double = rng.choice((0.0, 0.1))
        setting.delay = rng.choice((0.01, 0.1, 0.1, 3.0))
        setting.fail = rng.choice((0.0, 0.0, 0.0, 0.005, 0.05))
        setting.hang = rng.choice((0.0, 0.0, 0.0, 0.005, 0.03))
        setting.store = rng.choice((0.0, 0.0, 0.1, 0.4))
        span = 60 * size * len(program)
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))):
            fault = rng.choices(kinds, weights)[0]
            if rng.random() < 0.5:
                setting.faults[rng.randrange(1, span)] = fault
            else:
                setting.triggers.setdefault(rng.choice(TRIGGERS), []).append(fault)
        if rng.random() < 0.1:
            setting.triggers.setdefault(rng.choice((Verdict.COMMIT, Step.STORE)), []).append("withdraw")
        if rng.random() < 0.03:
            setting.refuse = rng.choice((Step.PREPARE, Step.LOCK_NETWORK, Step.CAPTURE, Step.PLACE, Step.RESTORE))
        setting.calm = rng.randrange(span, 2 * span)
        return setting
