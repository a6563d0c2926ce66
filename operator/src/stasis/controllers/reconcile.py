"""Carries out what is decided for a TrainJob. Every write is refused by the API server where the view was out of date,
and then comes again with another view: two controllers at once do no harm."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightkube import AsyncClient
from lightkube.types import PatchType

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import Addresses
from stasis.api.v1alpha1.trainjobcheckpoint import (
    HOLD_FINALIZER,
    CheckpointKind,
    ConditionType,
    TrainJobCheckpoint,
)
from stasis.controllers import live, status, stored
from stasis.controllers.addresses import Neighbours, means
from stasis.controllers.agents import Agents
from stasis.controllers.checks import Checks
from stasis.controllers.choices import Choices
from stasis.controllers.description import container_id, describe
from stasis.controllers.events import Teller
from stasis.controllers.fixed import changed, fixed_of
from stasis.controllers.keeping import Keeping
from stasis.controllers.live import Live
from stasis.controllers.metrics import Metrics
from stasis.controllers.observe import condition, holds, is_copy, seconds, unprepared
from stasis.controllers.operations import Operations
from stasis.controllers.registry import Registry
from stasis.controllers.seen import Key, Seen
from stasis.controllers.uploads import Uploads
from stasis.core import actions as a
from stasis.core.decide import decide
from stasis.core.frames import Home
from stasis.core.gate import Gate, Resume, Stamp
from stasis.core.plan import Kind, Outcome
from stasis.core.steps import Step
from stasis.errors import StasisError, StoreError
from stasis.kube.client import Checkpoints, JobSets, meta, translated, unless_changed
from stasis.kube.ranks import rank_of

log = logging.getLogger(__name__)

PARENT_LOST = "ParentLost"
MANY = 10  # differences that one event tells


@dataclass(frozen=True)
class Settings:
    repository: str  # prefix; NAMESPACE/UID of the job is added


class Reconciler:
    """`work(key)` for a work queue; `again(key)` puts a key there, from any thread."""

    def __init__(
        self,
        client: AsyncClient,
        seen: Seen,
        operations: Operations,
        agents: Agents,
        teller: Teller,
        settings: Settings,
        again: Callable[[Key], None],
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._seen = seen
        self._operations = operations
        self._agents = agents
        self._teller = teller
        self._settings = settings
        self._again = again
        self._metrics = metrics
        self._checks = Checks(agents, teller, seen, again)
        self._registry = Registry(client, teller)
        self._neighbours = Neighbours(client, teller)
        self._keeping = keeping = Keeping(client, seen, self._registry, teller, metrics, self._patch)
        choices = Choices(client, seen, teller, self._patch)
        self._handlers: Mapping[type, Callable[[Live, Any], Awaitable[None]]] = {
            a.Drive: self._drive,
            a.Conclude: self._conclude,
            a.Create: self._create,
            a.Begin: self._begin,
            a.BeginRestore: self._begin_restore,
            a.SetGate: self._set_gate,
            a.Mark: self._mark,
            a.OpenResume: self._open_resume,
            a.Fail: self._fail,
            a.Publish: keeping.publish,
            a.StartFresh: self._start_fresh,
            a.Word: self._word,
            a.Orphan: keeping.orphan,
            a.Expire: keeping.expire,
            a.LetGo: keeping.let_go,
            a.Check: self._check,
            a.Choose: choices.choose,
            a.GoBack: choices.go_back,
            a.PassOver: choices.pass_over,
            a.Fork: choices.fork,
            a.RefuseChoice: choices.refuse,
            a.TellNamesakes: choices.tell_namesakes,
            a.Tell: self._tell,
            a.Upload: Uploads(agents, self._registry, teller, self._patch, again).go_on,
        }

    async def work(self, key: Key) -> float | None:
        """Do what is due; after how many seconds to look again. Raises StasisError where not all could be done."""
        known = self._seen.view(key)
        glance = decide(known)
        if not glance.actions:
            return glance.again
        seen = await live.read(self._client, self._seen, key)
        self._seen.forget_gone(key, known, seen.view)
        decision = decide(seen.view)
        trouble: StasisError | None = None
        for action in decision.actions:
            try:
                await self._handlers[type(action)](seen, action)
            except StasisError as error:  # one that fails does not keep the others
                trouble = trouble or error
        if trouble is not None:
            raise trouble
        return decision.again

    # ------------------------------------------------------------ operations

    async def _drive(self, seen: Live, action: a.Drive) -> None:
        checkpoint = seen.checkpoint(action.checkpoint)
        known = self._operations.leads(action.op)
        self._operations.drive(
            _home(checkpoint),
            seen.key[1],
            seen.description(action.checkpoint, action.op),
            credentials="" if known else await self._registry.credentials_or_none(seen),
            withdraw=action.withdraw,
            lost=action.lost,
            told=lambda: self._again(seen.key),
        )

    async def _create(self, seen: Live, action: a.Create) -> None:
        job = meta(seen.job)
        checkpoint = Checkpoints.from_dict(
            {
                "metadata": {
                    "name": f"{job['name']}-{action.serial}",
                    "namespace": job["namespace"],
                    "labels": TrainJobCheckpoint.labels_for(job["name"], job["uid"]),
                    "finalizers": [HOLD_FINALIZER],
                },
                "spec": {
                    "trainJob": {"name": job["name"], "uid": job["uid"]},
                    "kind": str(CheckpointKind.SUSPEND),
                    "requestedBy": "spec.suspend",
                    "policy": seen.policy_name,
                    "container": seen.policy.container,
                },
            }
        )
        with translated(f"checkpoint {job['name']}-{action.serial}"):
            self._seen.checkpoint(await self._client.create(checkpoint), False)

    async def _begin(self, seen: Live, action: a.Begin) -> None:
        checkpoint = seen.checkpoint(action.checkpoint)
        pods = [seen.pods[pod.uid] for pod in action.pods]
        if refused := self._refused(seen, checkpoint, pods):
            await self._fail_with(seen, checkpoint, *refused)
            return
        if no_room := await self._keeping.make_room(seen):
            await self._fail_with(seen, checkpoint, "NotTaken", no_room)
            return
        repository = self._repository(seen, checkpoint)
        description = describe(
            checkpoint,
            action.kind,
            action.serial,
            pods,
            world_size=seen.view.jobset.ranks if seen.view.jobset else len(pods),
            repository=repository,
            policy=seen.policy,
            known=seen.known_addresses({pod.rank: pod.uid for pod in action.pods}),
            manifests=_parents(seen, checkpoint, repository),
            finished=action.finished,
        )
        facts = {
            "serial": action.serial,
            "policy": seen.policy_name,
            "repository": repository,
            "container": seen.policy.container,
            "fixed": fixed_of(pods),
            "worldSize": description.args["*"]["world_size"],
            "startTime": status.now(),
            "message": "",
        }
        await self._patch(checkpoint, status.begun(checkpoint, description, pods, **facts))
        what = "is checkpointed, and then suspended" if action.kind is Kind.RELEASE else "is checkpointed"
        await self._teller.tell(seen.job, "Checkpointing", f"{what}: {action.checkpoint}")

    def _refused(self, seen: Live, checkpoint: Any, pods: Sequence[Any]) -> tuple[str, str] | None:
        """Why no checkpoint of these pods is begun: a reason, and words."""
        causes = ((pod, cause) for pod in pods if (cause := unprepared(pod)))
        if words := [f"rank {rank_of(pod)}, pod {meta(pod)['name']}: {cause}" for pod, cause in causes]:
            return "Refused", "; ".join(words)
        asked = checkpoint["spec"].get("repository")
        if asked and asked not in (seen.policy.storage.repository, self._settings.repository):
            text = f"repository {asked} is neither the policy's nor the installation's: leave it out"
            return "Denied", text  # its memory would go where only the one who asked for it may look
        return None

    async def _begin_restore(self, seen: Live, action: a.BeginRestore) -> None:
        checkpoint = seen.checkpoint(action.checkpoint)
        pods = [seen.pods[pod.uid] for pod in action.pods]
        if difference := changed(checkpoint["status"], pods, copy=is_copy(checkpoint)):
            text = f"{difference} (give the job what it had, or resume it from another checkpoint)"
            await self._not_restorable(seen, checkpoint, "Changed", text)
            return
        repository, manifests = checkpoint["status"]["repository"], status.manifests_of(checkpoint)
        needs = await self._registry.call(seen, repository, stored.look, manifests)
        description = describe(
            checkpoint,
            Kind.RESTORE,
            action.serial,
            pods,
            world_size=checkpoint["status"]["worldSize"],
            repository=repository,
            policy=seen.policy,
            known=needs.addresses,
            manifests=manifests,
        )
        now = {rank: addresses[-1] for rank, addresses in description.addresses.items()}
        facts = {"addressMeans": means(needs.addresses, now)}
        await self._patch(checkpoint, status.begun(checkpoint, description, pods, **facts))
        self._neighbours.begin(seen.job, needs.addresses, now)

    async def _conclude(self, seen: Live, action: a.Conclude) -> None:
        checkpoint = seen.checkpoint(action.checkpoint)
        description = seen.description(action.checkpoint, action.op)
        generation = int(meta(seen.job).get("generation", 0)) if seen.job else 0
        results = self._operations.results(action.op)
        differing = _differing(results.get(Step.PLACE, {}))
        change = status.concluded(checkpoint, action.op, results, generation)
        await self._patch(checkpoint, change)
        self._operations.forget(description)
        entry = next(o for o in change["operations"] if o["op"] == action.op)
        outcome = Outcome(entry["outcome"])
        self._metrics.ended.labels(entry["kind"], outcome).inc()
        self._metrics.seconds.labels(entry["kind"]).observe(seconds(entry["endTime"]) - seconds(entry["startTime"]))
        message, bad = _told(outcome, action.checkpoint, str(change.get("message", "")))
        await self._teller.tell(seen.job, str(outcome).capitalize(), message, warning=bad)
        for reason, text in differing:
            await self._teller.tell(seen.job, reason, text, warning=True)

    async def _check(self, seen: Live, action: a.Check) -> None:
        self._checks.begin(seen, action.nonce)

    # ------------------------------------------------------------ the gate

    async def _set_gate(self, seen: Live, action: a.SetGate) -> None:
        await self._write_gate(seen, action.gate)
        if action.reason:
            await self._teller.tell(seen.job, action.reason, action.message, warning=True)

    async def _open_resume(self, seen: Live, action: a.OpenResume) -> None:
        checkpoint = seen.checkpoint(action.checkpoint)
        try:
            needs = await self._registry.call(
                seen, checkpoint["status"]["repository"], stored.look, status.manifests_of(checkpoint)
            )
        except StoreError as error:
            if error.retryable:
                await self._teller.tell(seen.job, error.reason, f"not resumed yet: {error}", warning=True)
                raise
            await self._not_restorable(seen, checkpoint, error.reason, str(error))
            return
        keep = seen.policy.addresses is not Addresses.TRANSLATE and not is_copy(checkpoint)
        stamp = Stamp(
            checkpoint=action.checkpoint,
            uid=meta(checkpoint)["uid"],
            generation=action.generation,
            addresses={rank: known[0] for rank, known in needs.addresses.items()} if keep else {},
            inits=needs.inits,
            container=str(checkpoint["status"].get("container", "")),
        )
        await self._write_gate(seen, Resume(stamp))
        await self._teller.tell(seen.job, "Resuming", f"from checkpoint {action.checkpoint}")

    async def _not_restorable(self, seen: Live, checkpoint: Any, reason: str, message: str) -> None:
        """Not as the job is now."""
        generation = int(meta(seen.job)["generation"])
        await self._patch(checkpoint, status.not_restorable(checkpoint, reason, message, generation))
        await self._teller.tell(seen.job, "NotRestorable", f"{meta(checkpoint)['name']}: {message}", warning=True)

    async def _mark(self, seen: Live, action: a.Mark) -> None:
        await self._annotate(seen, names.RESTORE, str(action.generation))

    async def _write_gate(self, seen: Live, gate: Gate) -> None:
        await self._annotate(seen, names.GATE, str(gate))

    async def _annotate(self, seen: Live, name: str, text: str) -> None:
        """All that we write to an object that is not ours. Raises Conflict where it is no longer as it was read."""
        about = meta(seen.jobset)
        change = {
            "metadata": {
                "resourceVersion": about["resourceVersion"],
                "uid": about["uid"],
                "annotations": {name: text or None},
            }
        }
        namespace, jobset = seen.key
        with translated(f"jobset {namespace}/{jobset}"):
            changed = await self._client.patch(JobSets, jobset, change, namespace=namespace, patch_type=PatchType.MERGE)
        self._seen.jobset(changed, False)
        log.info("%s: %r", name, text, extra={"namespace": namespace, "job": jobset})

    # ------------------------------------------------------------ checkpoints

    async def _fail(self, seen: Live, action: a.Fail) -> None:
        await self._fail_with(seen, seen.checkpoint(action.checkpoint), action.reason, action.message)

    async def _fail_with(self, seen: Live, checkpoint: Any, reason: str, message: str) -> None:
        await self._patch(checkpoint, status.failed(checkpoint, reason, message))
        await self._teller.tell(seen.job, reason, f"{meta(checkpoint)['name']}: {message}", warning=True)

    async def _start_fresh(self, seen: Live, action: a.StartFresh) -> None:
        checkpoint = seen.checkpoint(action.checkpoint)
        cause = condition(checkpoint, ConditionType.RESTORED).get("message", "")
        await self._patch(checkpoint, status.started_fresh(checkpoint))
        text = f"the training begins anew, since {action.checkpoint} cannot be restored: {cause}"
        await self._teller.tell(seen.job, "StartedFresh", text, warning=True)

    async def _tell(self, seen: Live, action: a.Tell) -> None:
        if self._seen.says(seen.key, action.message):
            await self._teller.tell(seen.job, action.reason, action.message, warning=True)

    async def _word(self, seen: Live, action: a.Word) -> None:
        for pod in action.pods:
            obj = seen.pods[pod.uid]
            body = {"container_id": container_id(obj), "word": "run"}
            await self._agents.post(str(obj["spec"]["nodeName"]), "/v1/word", body)
            self._seen.tell(pod.uid)
            self._seen.pod(obj, False)
            text = f"pod {pod.name} was not there when its gang was restored: it runs its command"
            await self._teller.tell(seen.job, "PlaceholderReleased", text)

    async def _patch(self, checkpoint: Any, change: dict[str, Any]) -> None:
        """Of its status. Raises Conflict where it is no longer as it was read."""
        about = meta(checkpoint)
        with translated(f"checkpoint {about['namespace']}/{about['name']}"):
            changed = await self._client.patch(
                Checkpoints.Status,
                about["name"],
                unless_changed(checkpoint, change),
                namespace=about["namespace"],
                patch_type=PatchType.MERGE,
            )
        self._seen.checkpoint(changed, False)

    def _repository(self, seen: Live, checkpoint: Any) -> str:
        prefix = checkpoint["spec"].get("repository") or seen.policy.storage.repository or self._settings.repository
        return f"{prefix}/{seen.key[0]}/{meta(seen.job)['uid']}"


def _home(checkpoint: Any) -> Home:
    about = meta(checkpoint)
    return Home(about["namespace"], about["name"], about["uid"])


def _parents(seen: Live, checkpoint: Any, repository: str) -> dict[int, str]:
    """Manifests of the last checkpoint in the same repository, unless they were found to be lost."""
    job = meta(seen.job)["uid"]
    others = [c for c in seen.checkpoints.values() if c is not checkpoint and c["spec"]["trainJob"]["uid"] == job]
    others = [c for c in others if "deletionTimestamp" not in meta(c)]
    others.sort(key=lambda c: int((c.get("status") or {}).get("serial") or 0))
    for other in reversed(others):
        if condition(other, ConditionType.FAILED).get("reason") == PARENT_LOST:
            return {}
        if holds(other, ConditionType.DURABLE) and other["status"].get("repository") == repository:
            return status.manifests_of(other)
    return {}


def _differing(placed: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the ranks may find to be other than it was: the reason of an event, and words."""
    found = []
    for reason, key in (("VolumeChanged", "volumes"), ("MachineChanged", "machine")):
        texts = [f"rank {rank}: {text}" for rank, result in sorted(placed.items()) for text in result.get(key, ())]
        if texts:
            more = f" and {len(texts) - MANY} more" if len(texts) > MANY else ""
            found.append((reason, "; ".join(texts[:MANY]) + more))
    return found


def _told(outcome: Outcome, name: str, message: str) -> tuple[str, bool]:
    """What the user is told of an operation's end, and whether it is bad news."""
    match outcome:
        case Outcome.RELEASED:
            return f"saved as {name}", False
        case Outcome.CONTINUED:
            return f"saved as {name}; the training goes on", False
        case Outcome.RESTORED:
            return f"resumed from {name}", False
        case Outcome.BROKEN:
            return f"resumed from {name}, and then a rank failed: {message}", True
        case Outcome.ABORTED:
            return f"not checkpointed, the training goes on: {message}", True
        case _:
            return f"not restored from {name}, which is as before: {message}", True
