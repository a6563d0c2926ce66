"""Suspend, checkpoint and resume a gang on this machine: what `kubectl patch` will do in a cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from stasis.core.plan import Kind, Outcome, Spec, Timing
from stasis.core.rankconfig import RankConfig
from stasis.core.records import Record
from stasis.core.steps import Step
from stasis.errors import CheckpointFailed, Finding, Refused, ResourceShort, RestoreFailed, StasisError, UsageError
from stasis.local.gang import LocalGang
from stasis.local.operation import LocalAgent, OnStage, Report
from stasis.store.checkpoint import open_checkpoint, publish
from stasis.store.connect import open_repository
from stasis.store.media import MANIFEST, RANK, RANK_ARTIFACT, UID, Descriptor
from stasis.store.reference import Reference


class LocalOperator:
    """Takes a gang through checkpoints and restores; `where` is a reference with a tag."""

    def __init__(
        self,
        gang: LocalGang,
        where: str,
        *,
        timing: Timing | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_stage: OnStage = lambda what: None,
    ) -> None:
        self.gang = gang
        self.where = Reference.parse(where)
        if not self.where.tag:
            raise UsageError(f"{where} names no tag", remedy=f"add one: {where}:latest")
        self.agent = LocalAgent(
            gang.folder.with_name(gang.folder.name + ".state"),
            status=lambda rank: gang.places[rank].container.status(),
            progress=progress,
        )
        self.timing = timing or Timing()
        self._on_stage = on_stage
        self._known: dict[int, tuple[str, ...]] = {}  # addresses by which the processes know each rank
        self._parents: Mapping[int, str] = {}  # manifests of the checkpoint before

    def close(self) -> None:
        self.agent.close()

    def suspend(self) -> Report:
        """Checkpoint every rank and let its container end. Raises Refused or CheckpointFailed: the gang runs on."""
        return self._checkpoint(Kind.RELEASE)

    def checkpoint(self) -> Report:
        """Checkpoint every rank while training goes on. Raises Refused or CheckpointFailed."""
        return self._checkpoint(Kind.CONTINUE)

    def _checkpoint(self, kind: Kind) -> Report:
        uid = str(uuid.uuid4())
        jobs = self._jobs(uid=uid, releases=kind is Kind.RELEASE)
        for rank, parent in self._parents.items():
            jobs[str(rank)]["parent"] = parent
        ranks = tuple(sorted(self.gang.places))
        spec = Spec(uid, self.agent.next_serial(), kind, ranks, args={Step.PREPARE: jobs}, timing=self.timing)
        report = self.agent.run(spec, self._on_stage)
        if not report.succeeded or report.commit is None:
            raise failure(report, CheckpointFailed)
        self._publish(report.commit)
        return report

    def _publish(self, commit: Record) -> None:
        """Point the tag to a committed checkpoint. Can be repeated."""
        config = {"command": list(self.gang.spec.command), "worldSize": self.gang.spec.ranks}
        with open_repository(self.where) as repository:
            descriptors = []
            for rank, digest in sorted(commit.manifests.items()):
                size = len(repository.get_manifest(digest).body)
                notes = {UID: commit.op, RANK: str(rank)}
                descriptors.append(Descriptor(MANIFEST, digest, size, RANK_ARTIFACT, notes))
            publish(repository, self.where.tag, commit.op, descriptors, config)
        self._parents = commit.manifests

    def recover(self) -> list[Report]:
        """Bring what an agent before this one left under way to its end, as it was decided or by giving it up."""
        reports = self.agent.recover(self._on_stage)
        for report in reports:
            if report.commit is not None and report.outcome in (Outcome.RELEASED, Outcome.CONTINUED):
                self._publish(report.commit)
        return reports

    def resume(self, *, new_addresses: bool = False, options: Mapping[str, object] | None = None) -> Report:
        """Start placeholders and restore the checkpoint of the reference in them. Raises RestoreFailed: the
        placeholders wait on, the checkpoint is intact."""
        with open_checkpoint(self.where) as checkpoint:
            uid = checkpoint.uid
            manifests = {rank.rank: rank.digest for rank in checkpoint.ranks}
            self._known = RankConfig.from_dict(checkpoint.ranks[0].config).known()
        if set(manifests) != set(self.gang.places):
            raise UsageError(f"{self.where} has the ranks {sorted(manifests)}, the gang {sorted(self.gang.places)}")
        self.gang.replace(new_addresses=new_addresses, options=options)
        jobs = self._jobs(uid=uid, releases=True)
        for rank, digest in manifests.items():
            jobs[str(rank)]["manifest"] = digest
        serial = self.agent.next_serial()
        spec = Spec(
            f"{uid}-r{serial}",
            serial,
            Kind.RESTORE,
            tuple(sorted(manifests)),
            args={Step.PLACE: jobs},
            timing=self.timing,
            checkpoint=uid,
            attempts=2,
        )
        report = self.agent.run(spec, self._on_stage)
        if not report.succeeded:
            raise failure(report, RestoreFailed)
        self._parents = manifests
        return report

    def _addresses(self) -> dict[int, list[str]]:
        """All of each rank: its first pod's, later ones still in use, and at last the one that it has now."""
        places = self.gang.places.items()
        return {rank: [*(a for a in self._known.get(rank, ()) if a != p.address), p.address] for rank, p in places}

    def _jobs(self, *, uid: str, releases: bool) -> dict[str, dict[str, Any]]:
        """Each rank's arguments of the first step."""
        places = self.gang.places
        addresses = {str(rank): known for rank, known in self._addresses().items()}
        return {
            str(rank): {
                "container_id": place.container.id,
                "rank": rank,
                "world_size": self.gang.spec.ranks,
                "repository": str(self.where.repository),
                "addresses": addresses,
                "volumes": list(place.container.spec.emptydirs),
                "releases": releases,
                "uid": uid,
            }
            for rank, place in places.items()
        }


def failure(report: Report, kind: type[StasisError]) -> StasisError:
    """The error that an operation's first failure stands for: what was short before anything happened, or `kind`."""
    first = next(iter(report.failures), None)
    if first is None:
        return kind(f"{report.kind} ended as {report.outcome}")
    if first.reason == "Refused" and (found := first.detail.get("findings")):
        return Refused([Finding(**finding) for finding in found])
    if first.reason == ResourceShort.__name__ and first.step in (Step.PREPARE, Step.PLACE):
        return ResourceShort(f"rank {first.rank}: {first.message}", remedy=first.remedy)
    return kind(str(first))
