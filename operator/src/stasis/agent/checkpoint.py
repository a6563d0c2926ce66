"""One rank's part in a checkpoint.

The tree is frozen from `freeze` to `thaw` or `release`; between them its pages may be held by reference. A guardian
that somebody else has started watches over the freeze.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stasis.agent import attributes, cgroups, fingerprint, lookup, nested, proctree, scan
from stasis.agent.capture import Captured, capture_tree
from stasis.agent.cuda import preflight
from stasis.agent.cuda.placing import Saved
from stasis.agent.files.volumes import open_files
from stasis.agent.freezer import HIERARCHY
from stasis.agent.kept import store_of
from stasis.agent.needs import needs
from stasis.agent.network import diag, lock, options
from stasis.agent.network.nft import Nft
from stasis.agent.network.sockets import TcpSockets, drain
from stasis.agent.node import Job, Node
from stasis.agent.pipes import Buffers
from stasis.agent.rank import Args, Rank, Result
from stasis.agent.reserve import Reservation
from stasis.agent.storing import MEMORY, Storing
from stasis.agent.volume import VOLUME, write_word
from stasis.core.capacity import Amounts, Mode
from stasis.core.rankconfig import RankConfig
from stasis.core.steps import Step
from stasis.errors import CheckpointFailed, Finding, Refused
from stasis.store.media import Descriptor
from stasis.store.reference import Reference

DRAIN_SECONDS = 1.0
SETTLE_TRIES = 5
SETTLE_SECONDS = 0.05
DUMP_SECONDS = 600.0


class CheckpointRank(Rank):
    """The state of one rank in one checkpoint."""

    def __init__(
        self,
        node: Node,
        progress: Callable[[int], None] | None = None,
        announce: Callable[[Descriptor], None] = lambda manifest: None,
    ) -> None:
        """`announce` is told the rank's manifest before it is in the store."""
        super().__init__(
            node,
            {
                Step.PREPARE: self._prepare,
                Step.LOCK_DEVICES: self._lock_devices,
                Step.SAVE_DEVICES: self._save_devices,
                Step.FREEZE: self._freeze,
                Step.DRAIN: self._drain,
                Step.LOCK_NETWORK: self._lock_network,
                Step.CAPTURE: self._capture,
                Step.UNLOCK_NETWORK: self._unlock_network,
                Step.THAW: self._thaw,
                Step.STORE: self._store,
                Step.RELEASE: self._release,
                Step.CONTINUE: self._continue,
            },
        )
        self._progress = progress
        self._announce = announce
        self._buffers = Buffers()
        self._captured: Captured | None = None
        self._sockets: TcpSockets | None = None
        self._options: options.Options = {}
        self._gathered: list[dict[str, Any]] = []  # groups that gathering takes the tree out of
        self._nft: Nft | None = None  # open before the freeze, closed after the thaw
        self._reservation: Reservation | None = None
        self._storing: Storing | None = None
        self._manifest: dict[str, Any] | None = None

    # Before the freeze.

    def _prepare(self, args: Args) -> Result:
        job = self._job = Job.from_args(args)
        try:
            self._find()
            gpus = bool(self.node.hardware.version)
            findings = scan.scan(self._pid1, self._root, gpus=gpus) + self._unattachable()
            if gpus:
                findings += preflight.findings(self._root.pid, self.node.hardware)
            if findings:
                raise Refused(findings)
        except ProcessLookupError as gone:
            raise CheckpointFailed(f"rank {job.rank} has nothing to checkpoint: {gone}") from gone
        _, root, freezer = self.tree
        groups = nested.nested_groups(self._pid1, root, job.container_id)
        self._gathered = [group for group in groups if group["hierarchy"] == HIERARCHY[freezer.version]]
        freezer.gather(root.pid)
        self._on_gpus = preflight.memory(self._pid1, root.pid, self.node.hardware) if gpus else 0
        found = needs(self._pid1, root)
        self._needs = replace(found, private=found.private + self._on_gpus)  # it will be in host memory
        self._reserve(self._needs.total)
        if self._storing is None:
            self._storing = Storing(job, store_of(job, self.node.state), self._progress)
        if self._nft is None:
            assert self._netns is not None
            self._nft = Nft(self._netns)
        return {"root": {"pid": self._root.pid, "start": self._root.start}, "needs": self._needs.as_dict()}

    def _unattachable(self) -> list[Finding]:
        """Tracing a task that a signal has stopped needs it to run for a moment, which v1's freezer does not let it."""
        if self._freezer is None or self._freezer.version == "v2":
            return []
        cause = "it is stopped by a signal, and CRIU cannot attach to it in a cgroup v1 freezer"
        return [
            Finding(cause, "continue or end it, or use a node with cgroup v2", pid, proctree.read(pid, pid, "comm"))
            for pid in proctree.walk(self._root.pid)
            if proctree.state(pid, pid) == "T"
        ]

    def _find(self) -> None:
        super()._find()
        self._root = lookup.find_root(self._pid1)
        self._init = Path(f"/proc/{self._root.pid}/exe").read_bytes()

    def _reserve(self, size: int) -> None:
        """Room for the capture, and where the pages go; memory is faulted in before anything is frozen."""
        job = self.job
        if self._reservation is None:
            stays = Reference.parse(store_of(job, self.node.state)).path is not None
            kept = Amounts(memory=MEMORY, disk=size if stays else 0)
            name = f"{job.uid}.{job.rank}"
            self._reservation = self.node.ledger.reserve(name, size, releases=job.releases, kept=kept)
        if self._reservation.plan.mode is Mode.COPY:
            self._buffers.reserve(size)

    def _lock_devices(self, args: Args) -> Result:
        if self.node.hardware.version:
            self.devices.lock(self._root.pid)
        return {"processes": len(self.devices.processes)}

    def _save_devices(self, args: Args) -> Result:
        if self.devices.processes:
            self.devices.save(self._root.pid)
        return {"bytes": self._on_gpus}

    # Frozen.

    def _freeze(self, args: Args) -> Result:
        _, root, freezer = self.tree
        stopped = {pid for pid in freezer.gather(root.pid) if proctree.state(pid, pid) == "T"}
        pids = freezer.freeze()
        if not self._root.alive():
            raise CheckpointFailed(f"rank {self.job.rank} ended before it was frozen")
        self._stopped = [lookup.inner_pids(pid)[-1] for pid in stopped & pids]
        self._pids = pids
        self._hold_sockets()
        write_word(self._pid1, "state", "frozen")
        return {"processes": len(pids)}

    def _hold_sockets(self) -> TcpSockets:
        if self._sockets is None:
            self._sockets = TcpSockets(self._pids)
            self._options = options.read(self._sockets)
        options.hold(self._sockets)
        return self._sockets

    def _let_go_of_sockets(self) -> None:
        if self._sockets is not None:
            options.write(self._sockets, self._options)
            self._sockets.close()
            self._sockets = None

    def _drain(self, args: Args) -> Result:
        """Until nothing is in flight, and no connection is in a state that no image can hold: those settle when the
        tree runs on for a moment."""
        assert self._netns is not None
        _, _, freezer = self.tree
        for _ in range(SETTLE_TRIES):
            sockets = self._hold_sockets()
            left = drain(sockets.connected(self.job.gang()), DRAIN_SECONDS)
            findings = diag.unsettled(self._netns, self.job.gang(), sockets.listening())
            findings += scan.scan(self._pid1, self._root, frozen=True)
            if not findings:
                return {"left": left}
            self._let_go_of_sockets()
            freezer.thaw()
            time.sleep(SETTLE_SECONDS)
            self._pids = freezer.freeze()
        raise Refused(findings)

    def _lock_network(self, args: Args) -> Result:
        assert self._sockets is not None
        assert self._nft is not None
        lock.lock(self._nft, self.job.gang(), self._sockets.within(self.job.old(str(self.job.rank))))
        return {"in_flight": sum(s.in_flight for s in self._sockets.connected(self.job.gang()))}

    def _capture(self, args: Args) -> Result:
        if self._captured is None:
            assert self._reservation is not None
            pid1, root, freezer = self.tree
            inner = lookup.inner_pids(root.pid)[-1]
            self._attributes = attributes.attributes(pid1, root.pid)
            self._groups = self._gathered + nested.nested_groups(pid1, root, self.job.container_id)
            self._open_on_volumes = open_files(pid1, self._pids, ["/dev/shm", f"/{VOLUME}", *self.job.volumes])
            self._captured = capture_tree(
                self.node,
                self._criu,
                pid1,
                inner,
                freezer.fd,
                self.job,
                self._reservation.plan.mode,
                self._buffers,
                timeout=DUMP_SECONDS,
            )
        if self.tree[2].state() != "frozen":
            raise CheckpointFailed(f"rank {self.job.rank} ran on while it was captured")
        return {
            "size": self._captured.size,
            "connections": [c.as_dict() for c in self._captured.connections],
            "bound": sorted({str(b.address) for b in self._captured.bound}),
        }

    def _unlock_network(self, args: Args) -> Result:
        if self._netns is not None:
            lock.unlock(self._nft or self._netns)
        return {}

    def _thaw(self, args: Args) -> Result:
        self._let_go_of_sockets()
        if self._freezer is not None:
            with contextlib.suppress(OSError):
                write_word(self._pid1, "state", "running")
            self._freezer.thaw()
            cgroups.move_all(self._freezer.nested)
        return {}

    # Durable.

    def _store(self, args: Args) -> Result:
        if self._manifest is None:
            captured, storing = self._captured, self._storing
            assert captured is not None
            assert storing is not None
            self._manifest = storing.write(captured, self._init, lambda: self._config(captured, args), self._announce)
            self._forget_captured()
        return self._manifest

    def _config(self, captured: Captured, args: Args) -> RankConfig:
        job = self.job
        return RankConfig(
            uid=job.uid,
            rank=job.rank,
            world_size=job.world_size,
            root=captured.root,
            threads=self._needs.threads,
            last_pid=captured.last_pid,
            hostname=captured.hostname,
            init=os.readlink(f"/proc/{self._root.pid}/exe"),
            addresses=args.get("addresses", {}),
            stdio=captured.stdio,
            areas={name: area.data for name, area in captured.area_sizes.items()},
            stopped=tuple(self._stopped),
            attributes=tuple(self._attributes),
            cgroups=tuple(self._groups),
            open_on_volumes=tuple(file.as_dict() for file in self._open_on_volumes),
            huge_pages={str(size): count for size, count in self._needs.huge_pages.items()},
            connections=tuple(c.as_dict() for c in captured.connections),
            fixes=args.get("fixes", {}),
            outside=tuple(args.get("outside", ())),
            options=self._options,
            fingerprint=fingerprint.read(self.node.bundle, self._root.pid).as_dict(),
            sizes={"memory": self._needs.memory},
            devices=self._saved_devices(),
            timings={step: round(seconds, 4) for step, seconds in self._timings.items()},
        )

    def _saved_devices(self) -> dict[str, Any]:
        processes = self.devices.processes
        return Saved.of(self.node.hardware, processes, self._on_gpus).as_dict() if processes else {}

    # After the decision.

    def _release(self, args: Args) -> Result:
        if self._freezer is not None:  # None: the container is gone already
            write_word(self._pid1, "word", "released")
            self._let_go_of_sockets()  # descriptors of ours would keep connections alive
            self._freezer.kill()
            self._freezer.remove()
        self._forget_devices()
        self._close()
        return {}

    def _continue(self, args: Args) -> Result:
        """Forget what was captured; give the processes back to their groups."""
        if self._freezer is not None:
            self._freezer.remove()
        self._forget_devices()
        self._close()
        return {}

    def _forget_captured(self) -> None:
        if self._captured is not None:
            self._captured.close()
            self._captured = None
        self._buffers.trim()

    def _close(self) -> None:
        self._forget_captured()
        if self._storing is not None:
            self._storing.close()
            self._storing = None
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        if self._nft is not None:
            self._nft.close()
            self._nft = None
        super()._close()
