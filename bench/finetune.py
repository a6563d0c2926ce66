"""A quantized fine-tune, checkpointed twice with a step between: P8 and P9."""

from __future__ import annotations

from bench.dense import ENDS, Places
from bench.measure import Samples
from bench.product import Product, since_freeze, stored
from bench.registry import forget
from bench.subject import Subject
from stasis.core.steps import Step


class Finetune:
    def __init__(self, subject: Subject, places: Places, samples: Samples) -> None:
        self._subject, self._places, self._samples = subject, places, samples
        self._run = 0

    def round(self) -> None:
        subject = self._subject
        self._run += 1
        with Product(subject.gang, f"{self._places.registry.host}/stasis/finetune{self._run}:bench") as product:
            for name in ("first", "second"):
                report = product.suspend()
                self._samples.add(f"{name}.stored", stored(report))
                self._samples.add(f"{name}.durable", since_freeze(report, Step.STORE))
                subject.gang.wait(ENDS)
                product.resume()
                subject.check()
                subject.step()
        forget(self._places.folder)
