"""Suspend, checkpoint and resume a gang on this machine: what `kubectl patch` will do in a cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stasis import errors
from stasis.core.plan import Kind, Spec, Timing
from stasis.core.rankconfig import RankConfig
from stasis.core.records import Failure, Record, Verdict, decision_key
from stasis.core.steps import Step
from stasis.errors import (
    CheckpointFailed,
    Corrupt,
    Finding,
    NotFound,
    ParentLost,
    Refused,
    RestoreFailed,
    StasisError,
    StoreError,
    UsageError,
)
from stasis.local import retention
from stasis.local.gang import LocalGang
from stasis.local.operation import LocalAgent, OnStage, Report
from stasis.store.checkpoint import open_checkpoint, publish
from stasis.store.connect import open_repository
from stasis.store.media import MANIFEST, RANK, RANK_ARTIFACT, UID, Descriptor
from stasis.store.reference import Reference


@dataclass(frozen=True)
class _Past:
    """What a gang brings along from before: its last checkpoint's manifests, by rank, to deduplicate against, and the
    addresses by which its processes know each rank."""

    manifests: Mapping[int, str]
    known: Mapping[int, tuple[str, ...]]


class LocalOperator:
    """Takes a gang through checkpoints and restores; `where` is a reference with a tag. A checkpoint that the tag
    pointed to before is removed when a new one is published, unless `keep`."""

    def __init__(
        self,
        gang: LocalGang,
        where: str,
        *,
        timing: Timing | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_stage: OnStage = lambda what: None,
        keep: bool = False,
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
        self._keep = keep

    def close(self) -> None:
        self.agent.close()

    def suspend(self) -> Report:
        """Checkpoint every rank and let its container end. Raises Refused, ResourceShort or CheckpointFailed: the gang
        runs on. StoreError: it is done, but the tag does not point to it yet; the next operation sees to that first."""
        return self._checkpoint(Kind.RELEASE)

    def checkpoint(self) -> Report:
        """Checkpoint every rank while training goes on. Raises as `suspend` does."""
        return self._checkpoint(Kind.CONTINUE)

    def _checkpoint(self, kind: Kind) -> Report:
        self.recover()
        uid = str(uuid.uuid4())
        past = self._past()
        jobs = self._jobs(past, uid=uid, releases=kind is Kind.RELEASE)
        for rank, parent in past.manifests.items():
            jobs[str(rank)]["parent"] = parent
        ranks = tuple(sorted(self.gang.places))
        spec = Spec(uid, self.agent.next_serial(), kind, ranks, args={Step.PREPARE: jobs}, timing=self.timing)
        report = self._run(spec)
        if report.succeeded:
            return report
        error = failure(report)
        if isinstance(error.__cause__, ParentLost) and past.manifests:  # swept meanwhile, what it was to build upon
            self._remember(_Past({}, past.known))
            return self._checkpoint(kind)
        raise error

    def _run(self, spec: Spec) -> Report:
        """Run an operation, or go on with it, up to what its end asks for."""
        report = self.agent.run(spec, self._on_stage)
        if report.succeeded and report.commit is not None:
            self._publish(report.commit)
        self.agent.settle(report)
        retention.forget_aborted(self.agent)
        return report

    def _publish(self, commit: Record) -> None:
        """Point the tag to a committed checkpoint. Can be repeated."""
        self._on_stage("publish")
        config = {"command": list(self.gang.spec.command), "worldSize": self.gang.spec.ranks}
        with open_repository(self.where) as repository:
            before = retention.tagged(repository, self.where.tag)
            descriptors = []
            for rank, digest in sorted(commit.manifests.items()):
                size = len(repository.get_manifest(digest).body)
                notes = {UID: commit.op, RANK: str(rank)}
                descriptors.append(Descriptor(MANIFEST, digest, size, RANK_ARTIFACT, notes))
            publish(repository, self.where.tag, commit.op, descriptors, config)
            self._remember(_Past(commit.manifests, self._past().known))
            if before is not None and before.uid != commit.op and not self._keep:
                retention.remove_replaced(self.agent, repository, before)

    def recover(self) -> list[Report]:
        """Bring what is under way to its end, as it was decided or by giving it up: what an agent before this one left,
        a tag that could not be written. Every operation begins with it."""
        self.agent.take_over()
        return [self._run(spec) for spec in self.agent.unfinished()]

    def resume(self, *, new_addresses: bool = False, options: Mapping[str, object] | None = None) -> Report:
        """Start placeholders and restore the checkpoint of the reference in them. Raises as `restore` does."""
        self.agent.node.warm(len(self.gang.places))
        uid, past = self._stored()
        self.gang.replace(new_addresses=new_addresses, options=options)
        return self._restore(uid, past)

    def restore(self) -> Report:
        """Restore the checkpoint of the reference in the gang's placeholders, as they wait. Raises RestoreFailed, or
        what else was wrong (Corrupt, Refused, ResourceShort, Unavailable ...): the placeholders wait on, the
        checkpoint is intact."""
        self.agent.node.warm(len(self.gang.places))
        return self._restore(*self._stored())

    def _stored(self) -> tuple[str, _Past]:
        """The checkpoint's UID, and what its ranks bring along. Only what was committed counts, whatever else the store
        says (rule 27)."""
        self.recover()
        with open_checkpoint(self.where) as checkpoint:
            manifests = {rank.rank: rank.digest for rank in checkpoint.ranks}
            commit = self.agent.records.read(decision_key(checkpoint.uid))
            if commit is None or commit.verdict is not Verdict.COMMIT:
                raise NotFound(f"the checkpoint {checkpoint.uid} of {self.where} was not committed here")
            if wrong := [digest for rank, digest in manifests.items() if commit.manifests.get(rank) != digest]:
                raise Corrupt(f"{self.where} names {wrong[0]}, which is not what was committed")
            known = RankConfig.from_dict(checkpoint.ranks[0].config).known()
        if set(manifests) != set(self.gang.places):
            raise UsageError(f"{self.where} has the ranks {sorted(manifests)}, the gang {sorted(self.gang.places)}")
        return checkpoint.uid, _Past(manifests, known)

    def _restore(self, uid: str, past: _Past) -> Report:
        self._remember(past)
        jobs = self._jobs(past, uid=uid, releases=True)
        for rank, digest in past.manifests.items():
            jobs[str(rank)]["manifest"] = digest
        serial = self.agent.next_serial()
        spec = Spec(
            f"{uid}-r{serial}",
            serial,
            Kind.RESTORE,
            tuple(sorted(past.manifests)),
            args={Step.PLACE: jobs},
            timing=self.timing,
            checkpoint=uid,
            attempts=2,
        )
        report = self._run(spec)
        if not report.succeeded:
            raise failure(report)
        return report

    # What outlives this operator: a restarted one goes on with the same gang.

    def _containers(self) -> list[str]:
        return [place.container.id for _, place in sorted(self.gang.places.items())]

    def _remember(self, past: _Past) -> None:
        entry = {
            "containers": self._containers(),
            "manifests": {str(rank): digest for rank, digest in past.manifests.items()},
            "known": {str(rank): list(known) for rank, known in past.known.items()},
        }
        self.agent.state.write("gang", "past", entry)

    def _past(self) -> _Past:
        entry = self.agent.state.read("gang", "past")
        if entry is None or entry["containers"] != self._containers():
            return _Past({}, {})  # its first containers
        known = {int(rank): tuple(known) for rank, known in entry["known"].items()}
        return _Past({int(rank): digest for rank, digest in entry["manifests"].items()}, known)

    def _jobs(self, past: _Past, *, uid: str, releases: bool) -> dict[str, dict[str, Any]]:
        """Each rank's arguments of the first step."""
        places = self.gang.places
        addresses = {  # all of each rank: its first pod's, later ones still in use, at last the one that it has now
            str(rank): [*(a for a in past.known.get(rank, ()) if a != place.address), place.address]
            for rank, place in places.items()
        }
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


def failure(report: Report) -> StasisError:
    """The error that an operation's first failure stands for, of its own class and so with its own exit code.

    A checkpoint that something in the store put an end to is a CheckpointFailed all the same, since the gang goes on;
    its cause is the store's error. What is no class of ours (RankExited, Busy) is CheckpointFailed or RestoreFailed.
    """
    kinds: list[type[StasisError]] = [CheckpointFailed, RestoreFailed]
    kind, other = reversed(kinds) if report.kind is Kind.RESTORE else kinds
    first = next(iter(report.failures), None)
    if first is None:
        return kind(f"{report.kind} ended as {report.outcome}")
    exact = _exact(first)
    if exact is None or isinstance(exact, other):
        return kind(str(first))
    if kind is CheckpointFailed and isinstance(exact, StoreError):
        failed = kind(str(first))
        failed.__cause__ = exact
        return failed
    return exact


def _exact(failed: Failure) -> StasisError | None:
    if failed.reason == Refused.__name__ and (found := failed.detail.get("findings")):
        return Refused([Finding(**finding) for finding in found])
    kind = getattr(errors, failed.reason, None)
    if not (isinstance(kind, type) and issubclass(kind, StasisError)) or kind in (Refused, StasisError):
        return None
    where = f"rank {failed.rank}: " if failed.rank is not None else ""
    step = f"{failed.step}: " if failed.step else ""
    return kind(f"{where}{step}{failed.message}", remedy=failed.remedy)
