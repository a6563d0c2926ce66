"""Stasis through its own path, with the times and costs of its steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.measure import Cost, Meter
from stasis.core.steps import Step
from stasis.local.gang import LocalGang
from stasis.local.operation import Report
from stasis.local.operator import LocalOperator

CHECKPOINT = (Step.FREEZE, Step.DRAIN, Step.LOCK_NETWORK, Step.CAPTURE, Step.UNLOCK_NETWORK, Step.THAW, Step.STORE)
RESTORE = (Step.PLACE, Step.LAY, Step.RESTORE, Step.RELEASE_NETWORK, Step.POKE_NETWORK, Step.THAW)


class Product:
    """One gang's operations on one repository; the first checkpoint has no parent."""

    def __init__(self, gang: LocalGang, where: str, on_stage: Callable[[str], None] = lambda stage: None) -> None:
        self._meter = Meter()
        self._on_stage = on_stage
        # What an operator remembers of the gang, its last checkpoint above all, would be this one's parent.
        shutil.rmtree(gang.folder.with_name(f"{gang.folder.name}.state"), ignore_errors=True)
        self._operator = LocalOperator(gang, where, on_stage=self._stage)

    def _stage(self, name: str) -> None:
        self._meter.begin(name)
        self._on_stage(name)

    def __enter__(self) -> Product:
        return self

    def __exit__(self, *_: object) -> None:
        self._operator.close()

    @property
    def costs(self) -> dict[str, Cost]:
        """Of the last operation, by step."""
        return self._meter.costs

    def checkpoint(self) -> Report:
        with self._metered():
            return self._operator.checkpoint()

    def suspend(self) -> Report:
        with self._metered():
            return self._operator.suspend()

    def resume(self) -> Report:
        """Also deletes the gang's containers and starts placeholders, which is in no step."""
        with self._metered():
            return self._operator.resume()

    @contextmanager
    def _metered(self) -> Iterator[None]:
        self._meter.costs.clear()
        try:
            yield
        finally:
            self._meter.end()


def since_freeze(report: Report, step: Step) -> float:
    """Seconds from the moment when the first rank is being frozen until the last one is through `step`."""
    began = min(float(result["began"]) for result in report.results[Step.FREEZE].values())
    return max(float(result["ended"]) for result in report.results[step].values()) - began


def stored(report: Report) -> int:
    """Bytes of packs that a checkpoint added, of all ranks."""
    return sum(int(result["stats"]["stored"]) for result in report.results[Step.STORE].values())


def raw(report: Report) -> int:
    return sum(int(result["stats"]["raw"]) for result in report.results[Step.STORE].values())
