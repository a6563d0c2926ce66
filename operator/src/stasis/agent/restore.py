"""One rank's part in a restore, in its placeholder.

Nothing of the checkpoint runs before `thaw`: until then every task is stopped and frozen and the network locked, and
`tear-down` leaves the placeholder as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from stasis.agent import admission, attributes, cgroups, lookup, nested, proctree
from stasis.agent.criu import container_cgroups
from stasis.agent.cuda import placing
from stasis.agent.files.laid import LaidList
from stasis.agent.files.lay import remove
from stasis.agent.files.volumes import volume_points
from stasis.agent.freezer import HIERARCHY
from stasis.agent.launch import raise_last_pid
from stasis.agent.names import hostname, set_hostname
from stasis.agent.network import diag, lock, options, translate
from stasis.agent.network.release import Gate
from stasis.agent.node import Job, Node
from stasis.agent.pipes import enlarge
from stasis.agent.rank import Args, Rank, Result
from stasis.agent.reader.client import Call, Reader
from stasis.agent.room import unlinked_file
from stasis.agent.volume import write_word
from stasis.core.rankconfig import AREA_PREFIX, INIT_BYTES, INIT_STREAM
from stasis.core.steps import Step
from stasis.errors import RestoreFailed
from stasis.store.reference import Reference

RESTORE_SECONDS = 600.0


class RestoreRank(Rank):
    """The state of one rank in one attempt to restore."""

    def __init__(self, node: Node) -> None:
        super().__init__(
            node,
            {
                Step.PLACE: self._place,
                Step.LAY: self._lay,
                Step.RESTORE: self._restore,
                Step.RELEASE_NETWORK: self._release_network,
                Step.POKE_NETWORK: self._poke_network,
                Step.THAW: self._thaw,
                Step.TEAR_DOWN: self._tear_down,
            },
        )
        self._reader: Reader | None = None
        self._gate: Gate | None = None
        self._noted: dict[str, Any] = {}

    def recover(self, args: Args) -> None:
        super().recover(args)
        with contextlib.suppress(FileNotFoundError):
            self._noted = json.loads(self._notes.read_text())

    def give_up(self) -> None:
        super().give_up()
        if (reader := self._reader) is not None:
            reader.kill()

    # Nothing is changed yet.

    def _place(self, args: Args) -> Result:
        job = self._job = Job.from_args(args)
        try:
            self._find()
        except ProcessLookupError as gone:
            raise RestoreFailed(f"rank {job.rank} has no placeholder: {gone}") from gone
        if self._reader is not None:
            self._reader.close()
        reader = self._reader = self.node.reader(job.repository, job.manifest)
        config = self._config = reader.config()
        if config.rank != job.rank or config.world_size != job.world_size:
            raise RestoreFailed(
                f"the checkpoint {job.manifest} is of rank {config.rank} of {config.world_size}, "
                f"not of rank {job.rank} of {job.world_size}"
            )
        admission.require_areas(self._pid1, config, job.volumes)
        machine = admission.admit(self._pid1, config, self.node.bundle)
        gpus = self._place_gpus()
        volumes = volume_points(self._pid1, [area.partition(":")[2] or "/dev/shm" for area in config.areas])
        self._images = reader.prepare(volumes)
        admission.require_rights(self._pid1, self._images.tasks)
        self._fetching = self._fetch(reader)
        admission.bring_init(self._pid1, config, lambda: reader.read(INIT_STREAM, INIT_BYTES))
        changed = admission.changed_on_volumes(self._pid1, config)
        return {"pid1": self._pid1, "machine": machine, "volumes": changed, "gpus": gpus}

    def _place_gpus(self) -> dict[str, str]:
        if not self._config.devices:
            return {}
        hardware = self.node.hardware
        self._on_gpus = placing.Saved.from_dict(self._config.devices)
        self._gpus = placing.place(self._on_gpus, placing.of_container(self._pid1, hardware), hardware)
        return self._gpus

    def _fetch(self, reader: Reader) -> Call:
        """Have the packs checked to the last byte while files are laid: no process is started of what is damaged. Those
        of a registry are kept on the disk, if there is room: CRIU gets them from there."""
        far = Reference.parse(self.job.repository).path is None
        spool = unlinked_file(self.node.state, self._images.packed) if far else None
        try:
            return reader.fetch(spool)
        finally:
            if spool is not None:
                os.close(spool)

    @property
    def _reading(self) -> Reader:
        """The checkpoint's reader, once it was started."""
        if self._reader is None:
            raise RestoreFailed("the checkpoint is not being read")
        return self._reader

    # From here on `tear-down` has something to do.

    @property
    def _laid(self) -> Path:
        return self.node.state / f"laid-{self.job.container_id}"

    @property
    def _notes(self) -> Path:
        return self.node.state / f"notes-{self.job.container_id}"

    def _note(self, **what: Any) -> None:
        """What an agent that is restarted must know for `tear-down` and `thaw`."""
        self._noted |= what
        new = self._notes.with_name(f"{self._notes.name}.new")
        new.write_text(json.dumps(self._noted))
        new.replace(self._notes)

    def _lay(self, args: Args) -> Result:
        config, job = self._config, self.job
        assert self._netns is not None
        write_word(self._pid1, "state", "restoring")
        self._note(hostname=hostname(self._pid1))
        set_hostname(self._pid1, config.hostname)
        self._translate()
        lock.lock(self._netns, job.gang(), [c.ends for c in config.table()])
        nested.remake(self._pid1, config.cgroups, job.container_id)
        groups = cgroups.folders(self._pid1)
        with ThreadPoolExecutor(max(1, len(config.areas)), thread_name_prefix="lay") as pool:
            laid = pool.map(lambda area: self._lay_area(area, groups).as_dict(), config.areas)
            stats = dict(zip(config.areas, laid, strict=True))
        self._fetching.wait()  # in every rank before the first process of any of them
        return stats

    def _translate(self) -> None:
        """Where a rank has another address than its processes know, the old one goes on to mean it."""
        assert self._netns is not None
        ranks = {int(rank): self.job.old(rank) for rank in self.job.addresses}
        translate.check(ranks)
        own = ranks.pop(self.job.rank)
        peers = {old: now for places in ranks.values() for old, now in places.items()}
        translate.translate(self._netns, own, peers, [c.ends for c in self._config.table()], self._images.bound)

    def _lay_area(self, area: str, groups: list[str]) -> Any:
        read, write = os.pipe()
        enlarge(write)
        try:
            feeding = self._reading.start(AREA_PREFIX + area, write)
        finally:
            os.close(write)
        try:
            with self.node.worker() as worker:
                return worker.lay(self._pid1, area, read, self._laid, groups)
        finally:
            os.close(read)
            feeding.wait()

    def _restore(self, args: Args) -> Result:
        config, pid1 = self._config, self._pid1
        assert self._freezer is not None
        self._freezer.create()
        raise_last_pid(pid1, config.last_pid)
        inherit = {}
        try:
            for resource, fd in config.stdio.items():
                inherit[resource] = os.open(f"/proc/{pid1}/fd/{fd}", os.O_WRONLY)
            self._criu.restore(
                pid1,
                {name: partial(self._reading.image, name) for name in self._images.images},
                cgroups=container_cgroups(pid1, Path(self._freezer.path)),
                inherit=inherit,
                timeout=RESTORE_SECONDS,
                spill=bool(config.huge_pages),
            )
        finally:
            for fd in inherit.values():
                os.close(fd)
        self._root = self._find_restored()
        self._freeze()
        hierarchy = HIERARCHY[self._freezer.version]
        moves = nested.rejoin(pid1, self._root, config.cgroups, self.job.container_id, freezer=hierarchy)
        self._note(moves=moves)
        notes = attributes.reapply(pid1, self._root.pid, config.attributes)
        return {"root": {"pid": self._root.pid, "start": self._root.start}, "notes": notes}

    def _find_restored(self) -> lookup.Root:
        for child in lookup.children(self._pid1):
            if lookup.inner_pids(child)[-1:] == [self._config.root]:
                return lookup.find_root(self._pid1)
        raise RestoreFailed(f"CRIU restored no process {self._config.root} below init")

    def _freeze(self) -> None:
        """From stopped by signals (which programs would notice) to frozen: all but those that were stopped before."""
        assert self._freezer is not None
        self._freezer.gather(self._root.pid)
        pids = self._freezer.freeze()
        admission.require_restored_rights(self._pid1, pids)
        if self._config.devices:
            self.devices.expect(placing.restored(self._on_gpus, pids), self._gpus)
        for pid in pids:
            if lookup.inner_pids(pid)[-1] not in self._config.stopped:
                os.kill(pid, signal.SIGCONT)
        assert self._netns is not None
        self._gate = Gate(pids, self._netns)

    def _release_network(self, args: Args) -> Result:
        assert self._gate is not None
        self._gate.unlock()
        return {}

    def _poke_network(self, args: Args) -> Result:
        assert self._gate is not None
        assert self._netns is not None
        diag.destroy(self._netns, self._config.leaving())
        options.write(self._gate.sockets, self._config.options)  # timeouts and keepalives must not run while locked
        self._gate.poke()
        if not self._root.alive():
            raise RestoreFailed(f"the restored tree of rank {self.job.rank} is gone")
        return {}

    # From here on the restore is decided.

    def _thaw(self, args: Args) -> Result:
        assert self._freezer is not None
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        keeper = lookup.inner_pids(lookup.find_root(self._pid1).pid)[-1]
        write_word(self._pid1, "word", f"restored {keeper}")
        write_word(self._pid1, "state", "running")
        self._freezer.thaw()
        cgroups.move_all({int(pid): group for pid, group in self._noted.get("moves", {}).items()})
        self._close()
        return {}

    def _unlock_devices(self, args: Args) -> Result:
        standing = super()._unlock_devices(args)
        self.devices.require_running()
        self._forget_devices()
        return standing

    def _tear_down(self, args: Args) -> Result:
        """Kill what was restored, remove what was laid. The placeholder waits on, unless it is gone."""
        there = self._freezer is not None and not proctree.dead(self._pid1)
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self._freezer is not None:
            self._freezer.kill()
            self._freezer.remove()
        self._forget_devices()
        if there and self._laid.exists():
            remove(self._pid1, LaidList(self._laid))
        if self._netns is not None:
            diag.forget_closed(self._netns, self.job.gang())  # or the same connections could not be restored again
            lock.unlock(self._netns)
            translate.untranslate(self._netns)
        if there:
            if name := self._noted.get("hostname"):
                set_hostname(self._pid1, name)
            write_word(self._pid1, "state", "waiting")
        self._close()
        return {}

    def _close(self) -> None:
        if self._job is not None:
            self._laid.unlink(missing_ok=True)
            self._notes.unlink(missing_ok=True)
        super()._close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
