"""Dense training state, dumped and restored by Stasis and by what people would use: P1 to P4, P6, P7, P10, P11."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import plain
from bench.measure import Cost, Samples
from bench.product import Product, raw, since_freeze, stored
from bench.registry import Server, forget
from bench.subject import Subject
from stasis.core.steps import Step
from stasis.local.operation import Report

TMPFS = Path("/dev/shm")
ENDS = 10.0  # seconds for a released container to end


@dataclass(frozen=True)
class Places:
    """Where things are: a folder on the disk, the registry whose data is in it, a slow way to it, the oras program."""

    folder: Path
    registry: Server
    throttled: Server
    oras: Path


def warm(folder: Path) -> None:
    """Have all files in the page cache, as those are that CRIU has just written there."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


class Dense:
    """One round is each of the wanted experiments once; what they measure goes into `samples`."""

    def __init__(self, subject: Subject, places: Places, samples: Samples) -> None:
        self._subject, self._places, self._samples = subject, places, samples
        self._run = 0
        self._experiments: Mapping[str, Callable[[], None]] = {
            "tmpfs": self._tmpfs,
            "local": self._local,
            "continue": lambda: self._continue("continue", places.registry),
            "chain": self._chain,
            "registry": self._registry,
            "throttled": lambda: self._continue("throttled", places.throttled),
        }

    def round(self, wanted: Iterable[str], tell: Callable[[str], None]) -> None:
        """`wanted`: beginnings of sample names (`disk` is measured by `chain`)."""
        names = {"chain" if name == "disk" else name for name in wanted}
        self._run += 1
        for name, experiment in self._experiments.items():
            if name in names:
                tell(name)
                os.sync()  # what the one before left to write is not this one's to wait for
                experiment()
        forget(self._places.folder)

    def _tmpfs(self) -> None:
        images = TMPFS / f"stasis-bench-{os.getpid()}"
        try:
            _, cost = plain.dump(self._subject.container, images, release=False)
        finally:
            shutil.rmtree(images, ignore_errors=True)
        self._samples.add("tmpfs.dump", cost.wall)
        self._samples.stage("criu dump to tmpfs", cost)

    def _chain(self) -> None:
        subject, samples, folder = self._subject, self._samples, self._places.folder / "chain"
        archive = folder / "down" / "checkpoint.tar.zst"
        reference = f"{self._places.registry.host}/plain/dense:{self._run}"
        dumped, dumping = plain.dump(subject.container, folder / "images", release=True)
        samples.stage("criu dump to disk", dumping)
        samples.add("disk.dump", dumping.wall + plain.sync(dumped.images))
        archive.parent.mkdir()
        samples.stage("tar, zstd -1", plain.pack(dumped, archive, threads=1))
        packing = plain.pack(dumped, archive, threads=0)
        pushing = plain.push(self._places.oras, archive, reference)
        samples.stage("tar, zstd -1 -T0", packing)
        samples.stage("oras push", pushing)
        samples.add("chain.down", dumping.wall + packing.wall + pushing.wall)
        samples.add("chain.stored", archive.stat().st_size)
        subject.gang.wait(ENDS)
        samples.add("disk.restored", self._restore(dumped).wall)
        shutil.rmtree(dumped.images)
        pulling = plain.pull(self._places.oras, reference, folder / "up" / archive.name)
        unpacking = plain.unpack(folder / "up" / archive.name, dumped.images)
        restoring = self._restore(dumped)
        samples.stage("oras pull", pulling)
        samples.stage("zstd, tar", unpacking)
        samples.stage("criu restore", restoring)
        samples.add("chain.up", pulling.wall + unpacking.wall + restoring.wall)
        shutil.rmtree(folder)

    def _restore(self, dumped: plain.Dumped) -> Cost:
        self._subject.replace()
        cost = plain.restore(self._subject.container, dumped)
        self._subject.check()
        return cost

    def _continue(self, name: str, registry: Server) -> None:
        with Product(self._subject.gang, f"{registry.host}/stasis/{name}{self._run}:bench") as product:
            report = product.checkpoint()
            self._samples.add(f"{name}.frozen", since_freeze(report, Step.THAW))
            self._stages(f"stasis checkpoint, {name}", product, report)
        self._subject.check()

    def _local(self) -> None:
        layout = self._places.folder / "layout"
        self._suspend("local", f"{layout}:bench", lambda: warm(layout))
        shutil.rmtree(layout)

    def _registry(self) -> None:
        self._suspend("registry", f"{self._places.registry.host}/stasis/dense{self._run}:bench")

    def _suspend(self, name: str, where: str, before_resume: Callable[[], None] = lambda: None) -> None:
        subject, samples = self._subject, self._samples
        with Product(subject.gang, where) as product:
            report = product.suspend()
            samples.add(f"{name}.captured", since_freeze(report, Step.CAPTURE))
            samples.add(f"{name}.durable", since_freeze(report, Step.STORE))
            samples.add(f"{name}.stored", stored(report))
            self._stages(f"stasis suspend, {name}", product, report)
            subject.gang.wait(ENDS)
            before_resume()
            report = product.resume()
            samples.add(f"{name}.restored", report.seconds[Step.THAW])
            self._stages(f"stasis resume, {name}", product, report)
        subject.check()

    def _stages(self, name: str, product: Product, report: Report) -> None:
        sizes: dict[str, int] = {}
        if Step.STORE in report.results:
            sizes = {Step.CAPTURE: raw(report), Step.STORE: stored(report)}
        for step, cost in product.costs.items():
            if cost.wall >= 0.001:
                size = sizes.get(step, 0)
                self._samples.stage(f"{name}: {step}", Cost(cost.wall, cost.cpu, cost.peak, size))
