"""A training gang on one machine: N ranks in containers of their own, as TrainJob's pods would be."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stasis.local.container import Container, ContainerSpec
from stasis.local.network import Network

MASTER_PORT = 29500


@dataclass(frozen=True)
class GangSpec:
    """What the user asks for: a command, run as `ranks` ranks. `options` are further fields of ContainerSpec, `of_rank`
    those of one rank alone; they count for each container that is started from then on."""

    command: Sequence[str]
    ranks: int
    rootfs: Path
    init: Path
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    of_rank: Mapping[int, Mapping[str, object]] = field(default_factory=dict)


@dataclass
class Place:
    """Where a rank is now: its container, its address there, and how many containers it has had before."""

    container: Container
    address: str
    incarnation: int


class LocalGang:
    """The containers of a gang, made and made anew. Knows nothing of checkpoints: it plays kubelet's part.

    Every rank's log is kept over all its containers. `on_line(rank, line)` is called for each line,
    `before_ranks(netns)` once the network is there, before anything runs in it: for servers outside of the gang.
    """

    def __init__(
        self,
        name: str,
        spec: GangSpec,
        folder: Path,
        on_line: Callable[[int, str], None] = lambda rank, line: None,
        before_ranks: Callable[[Path], None] = lambda netns: None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.folder = folder
        self.network = Network(f"stasis-{name}")
        self.places: dict[int, Place] = {}
        self.lines: dict[int, list[str]] = {rank: [] for rank in range(spec.ranks)}
        self._on_line = on_line
        self._before_ranks = before_ranks
        self._next_address = 0
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start every rank's command."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.network.up()
        self._before_ranks(self.network.netns)
        addresses = {rank: self._address() for rank in range(self.spec.ranks)}
        self._write_hosts(addresses)
        for rank, address in addresses.items():
            self._place(rank, address, 0, placeholder=False, options={})

    def replace(self, *, new_addresses: bool, options: Mapping[str, object] | None = None) -> None:
        """Delete every container and start placeholders: fresh file systems, the same or new addresses."""
        addresses = {
            rank: self._address() if new_addresses else place.address for rank, place in sorted(self.places.items())
        }
        for place in self.places.values():
            place.container.delete()
        self._write_hosts(addresses)
        for rank, address in addresses.items():
            self._place(rank, address, self.places[rank].incarnation + 1, placeholder=True, options=options or {})

    def _place(
        self, rank: int, address: str, incarnation: int, *, placeholder: bool, options: Mapping[str, object]
    ) -> None:
        netns = self.network.attach(str(rank), address)
        fields: dict[str, object] = {
            "rootfs": self.spec.rootfs,
            "command": self.spec.command,
            "init": self.spec.init,
            "netns": netns,
            "hostname": f"{self.name}-{rank}",
            "env": {"POD_IP": address, **self._environment(rank), **self.spec.env},
            "hosts": self.folder / "hosts",
            **self.spec.options,
            **self.spec.of_rank.get(rank, {}),
            **options,
        }
        container = Container(
            ContainerSpec(**fields),  # type: ignore[arg-type]
            f"{self.name}-{rank}-{incarnation}",
            self.folder / f"{rank}.{incarnation}",
            placeholder=placeholder,
            on_line=lambda line: self._line(rank, line),
            unfinished=self.places[rank].container.unfinished if placeholder else (b"", b""),
        )
        self.places[rank] = Place(container, address, incarnation)
        container.start()

    def _environment(self, rank: int) -> dict[str, str]:
        """What torchrun and Trainer's torch plugin would set."""
        master, size = f"{self.name}-0", str(self.spec.ranks)
        if self.spec.ranks == 1:
            return {}
        return {
            "PET_NNODES": size,
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": master,
            "PET_MASTER_PORT": str(MASTER_PORT),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(MASTER_PORT),
            "WORLD_SIZE": size,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def _write_hosts(self, addresses: Mapping[int, str]) -> None:
        """Names lead to current addresses, as a headless service's do. Written in place: containers bind the file."""
        lines = ["127.0.0.1 localhost", *(f"{address} {self.name}-{rank}" for rank, address in addresses.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _address(self) -> str:
        self._next_address += 1
        return f"10.77.{1 + self._next_address // 200}.{1 + self._next_address % 200}"

    def _line(self, rank: int, line: str) -> None:
        with self._changed:
            self.lines[rank].append(line)
            self._changed.notify_all()
        self._on_line(rank, line)

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition` holds; it is asked whenever a line arrives, and at least every 100 ms."""
        waited = 0.0
        with self._changed:
            while not condition():
                if waited >= timeout:
                    return False
                if not self._changed.wait(0.1):
                    waited += 0.1
        return True

    def wait_for_step(self, step: int, timeout: float = 60.0) -> bool:
        """Wait until every rank has printed `step N` with N >= step, or any rank's container has ended."""
        pattern = re.compile(r"^step (\d+)\b")

        def reached(rank: int) -> bool:
            numbers = (pattern.match(line) for line in reversed(self.lines[rank]))
            last = next((match for match in numbers if match), None)
            return last is not None and int(last[1]) >= step

        def done() -> bool:
            return all(map(reached, self.lines)) or any(self.statuses().values())

        return self.wait_for(done, timeout) and all(map(reached, self.lines))

    def statuses(self) -> dict[int, int | None]:
        """Exit status of every rank's container, None while it runs."""
        return {rank: place.container.status() for rank, place in self.places.items()}

    def wait(self, timeout: float) -> dict[int, int | None]:
        """Wait until all ranks have ended."""
        self.wait_for(lambda: None not in self.statuses().values(), timeout)
        return self.statuses()

    def delete(self) -> None:
        for rank, place in self.places.items():
            place.container.delete()
            for rest in filter(None, place.container.unfinished):
                self._line(rank, rest.decode(errors="replace"))
            place.container.unfinished.clear()
        self.network.down()

    def __enter__(self) -> LocalGang:
        try:
            self.start()
        except BaseException:
            self.delete()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()
