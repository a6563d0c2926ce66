"""What is to be done next for one TrainJob: a pure function of what is seen of it now.

Nothing here remembers an edge. Whatever was missed, came twice or in another order, and whoever decided before: the
same view leads to the same actions, and each action makes a view in which it is not due again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from stasis.core.actions import (
    Action,
    Begin,
    BeginRestore,
    Check,
    Choose,
    Conclude,
    Create,
    Drive,
    Expire,
    Fail,
    Fork,
    GoBack,
    LetGo,
    Mark,
    OpenResume,
    Orphan,
    PassOver,
    Publish,
    RefuseChoice,
    SetGate,
    StartFresh,
    Tell,
    TellNamesakes,
    Upload,
    Word,
)
from stasis.core.durability import POLL
from stasis.core.gate import Gate, Held, Open, Resume, Suspend
from stasis.core.lineage import last, to_go_back_to, unusable
from stasis.core.lost import described, lost_ranks, on_silent_nodes, told, until_lost
from stasis.core.plan import Kind
from stasis.core.records import Verdict
from stasis.core.retention import Stored, Verdicts, of_gone_job, of_job
from stasis.core.view import Checkpoint, Failed, Incarnation, Job, JobSet, Operation, Pod, Use, View

RETRY = 10.0  # seconds from a failed checkpoint to the next one
RETRY_REFUSED = 60.0  # where the program itself stands against it


@dataclass(frozen=True, slots=True)
class Decision:
    """`again`: seconds until it may be another one though nothing that is seen has changed."""

    actions: tuple[Action, ...] = ()
    again: float | None = None

    def and_then(self, other: Decision) -> Decision:
        times = [again for again in (self.again, other.again) if again is not None]
        return Decision(self.actions + other.actions, min(times, default=None))

    @classmethod
    def to(cls, *actions: Action, again: float | None = None) -> Decision:
        return cls(actions, again)


WAIT = Decision()


def decide(view: View) -> Decision:
    """What is to be done now. Actions may be carried out in any order; after each of them a new view decides."""
    view, soon = told(view), until_lost(view)
    job = view.job if view.job is not None and not view.job.deleting else None
    own = [c for c in view.checkpoints if job is not None and c.job == job.uid]
    others = [c for c in view.checkpoints if job is None or c.job != job.uid]
    aside = _aside(view.checkpoints)
    if job is not None and job.check:
        aside = (*aside, Check(job.check))
    if job is not None and not job.told and not own and (left := tuple(c.name for c in others if not unusable(c))):
        aside = (*aside, TellNamesakes(left))
    if any(isinstance(action, Conclude) for action in aside):
        return Decision(aside, soon)
    rest = _orphaned(others, view)
    if job is not None and view.jobset is not None and not view.jobset.deleting:
        gang = _Gang(view, job, view.jobset, own)
        rest = rest.and_then(gang.decide()).and_then(gang.retain())
    else:
        text = "the job is not enabled, or nothing of it is there"
        vain = tuple(Fail(c.name, text, "NotEnabled") for c in own if c.waiting and not c.deleting)
        rest = rest.and_then(Decision(_abandoned(own, view.pods) + vain))
    uploading = any(isinstance(action, Upload) for action in aside)
    return Decision(aside, POLL if uploading else None).and_then(rest).and_then(Decision(again=soon))


def stored(view: View) -> list[Stored]:
    """What the checkpoints of this name take. The newest of a job is not given up for others."""
    found = []
    for uid in {checkpoint.job for checkpoint in view.checkpoints}:
        own = [checkpoint for checkpoint in view.checkpoints if checkpoint.job == uid]
        needed = {c.name for c in own if not c.settled}
        needed |= {c.name for c in own[-1:]}
        if view.job is not None and view.jobset is not None and view.job.uid == uid:
            needed |= _Gang(view, view.job, view.jobset, own).needed()
        found += [Stored(c.name, c.completed_at, c.size, c.name in needed) for c in own]
    return found


def _aside(checkpoints: Sequence[Checkpoint]) -> tuple[Action, ...]:
    """What is due whatever else is going on."""
    actions: list[Action] = []
    for checkpoint in checkpoints:
        operations = checkpoint.operations
        ended = [operation for operation in operations if not operation.under_way and not operation.concluded]
        actions += [Conclude(checkpoint.name, operation.op) for operation in ended]
        if ended or _active(checkpoint):
            continue
        if checkpoint.deleting:
            actions.append(LetGo(checkpoint.name))
        elif checkpoint.local:
            actions.append(Upload(checkpoint.name))
        elif not checkpoint.published and not checkpoint.failed and not checkpoint.lost and operations:
            actions.append(Publish(checkpoint.name))
    return tuple(actions)


def _orphaned(checkpoints: Sequence[Checkpoint], view: View) -> Decision:
    """Checkpoints whose job is gone: what is under way comes to its end, and what is kept is kept for a while."""
    actions: list[Action] = [*_abandoned(checkpoints, view.pods)]
    actions += [Fail(c.name, "its TrainJob is gone", "NotFound") for c in checkpoints if c.waiting and not c.deleting]
    actions += [Orphan(c.name) for c in checkpoints if c.settled and not c.orphaned_at]
    return Decision(tuple(actions)).and_then(_expired(of_gone_job(checkpoints, view.policy.retention, view.now), view))


def _expired(verdicts: Verdicts, view: View) -> Decision:
    actions = tuple(Expire(name, why) for name, why in verdicts.expired.items())
    return Decision(actions, None if verdicts.again is None else verdicts.again - view.now)


def _abandoned(checkpoints: Sequence[Checkpoint], pods: Sequence[Pod]) -> tuple[Action, ...]:
    return tuple(
        Drive(checkpoint.name, operation.op, withdraw=True, lost=lost_ranks(operation, pods))
        for checkpoint in checkpoints
        if (operation := _active(checkpoint))
    )


def _active(checkpoint: Checkpoint) -> Operation | None:
    return next((operation for operation in checkpoint.operations if operation.under_way), None)


class _Gang:
    """A TrainJob that is there, with its JobSet; none of its operations has an end that is not concluded."""

    def __init__(self, view: View, job: Job, jobset: JobSet, checkpoints: list[Checkpoint]) -> None:
        self.view = view
        self.job = job
        self.jobset = jobset
        self.checkpoints = checkpoints

    def decide(self) -> Decision:
        for checkpoint in self.checkpoints:
            if operation := _active(checkpoint):
                return self._under_way(checkpoint, operation)
        if (choice := self._choose()) is not None:
            return choice
        if self.job.finished:
            return Decision(self._give_up(tuple(Kind), "the job has ended", "NotRunning"))
        if why := self._rests():
            beside = Decision(self._give_up((Kind.CONTINUE,), f"there is nothing to save: {why}", "NotRunning"))
            return beside.and_then(self._turn())
        return self._turn()

    def _turn(self) -> Decision:
        if self.job.suspend:
            return self._suspended() if self.jobset.suspend else self._suspend()
        return self._resume() if self.jobset.suspend else self._run()

    def retain(self) -> Decision:
        """What is no longer kept of what was saved."""
        return _expired(of_job(self.checkpoints, self.needed(), self.view.policy.retention, self.view.now), self.view)

    def needed(self) -> set[str]:
        """Checkpoints that something depends on."""
        names = {one.name for one in (self.current, last(self.checkpoints)) if one}
        names |= {checkpoint.name for checkpoint in self.checkpoints if checkpoint.local}
        if isinstance(self.jobset.gate, Held):
            names.add(self.jobset.gate.checkpoint)
        stamps = [pod.incarnation for pod in self.view.pods] + [self.jobset.incarnation]
        origins = {stamp.checkpoint for stamp in stamps if stamp}  # they tell which addresses the processes know
        return names | {checkpoint.name for checkpoint in self.checkpoints if checkpoint.uid in origins}

    def _give_up(self, kinds: Container[Kind], message: str, reason: str = "NotTaken") -> tuple[Action, ...]:
        """Checkpoints that were asked for and not begun."""
        waiting = (c for c in self.checkpoints if c.waiting and not c.deleting and c.kind in kinds)
        return tuple(Fail(checkpoint.name, message, reason) for checkpoint in waiting)

    def _rests(self) -> str:
        """Why no checkpoint can be taken beside the training; empty where one can."""
        if self.job.suspend or self.jobset.suspend:
            return "the job is suspended, or to be"
        if self.current is not None:
            return f"the job is being resumed from {self.current.name}"
        running, finished = self._gang()
        return "" if self._whole(running, finished) else self._missing(running, finished)

    @property
    def current(self) -> Checkpoint | None:
        """The checkpoint that the job's state is in: its ranks were released, and have not run since."""
        for checkpoint in reversed(self.checkpoints):
            if checkpoint.stands:
                return checkpoint
            if checkpoint.released and checkpoint.use is not Use.PASSED:
                return None
        return None

    def _serial(self, checkpoint: Checkpoint | None = None) -> int:
        """Of the next operation; of `checkpoint` where it has been given none yet."""
        if checkpoint is not None and checkpoint.serial:
            return checkpoint.serial
        others = [other for other in self.checkpoints if other is not checkpoint]
        serials = [other.serial for other in others]
        serials += [operation.serial for other in others for operation in other.operations]
        # Names are made of serials, and those of jobs before this one are taken.
        suffixes = [other.name.rpartition("-")[2] for other in self.view.checkpoints if other is not checkpoint]
        serials += [int(text) for text in suffixes if text.isascii() and text.isdigit()]
        stamps = [pod.incarnation for pod in self.view.pods] + [self.jobset.incarnation]
        serials += [stamp.generation for stamp in stamps if stamp]
        if isinstance(self.jobset.gate, Resume) and self.jobset.gate.stamp:
            serials.append(self.jobset.gate.stamp.generation)
        return 1 + max(serials, default=0)

    def _gate(self, gate: Gate, reason: str = "", message: str = "") -> tuple[SetGate, ...]:
        return () if self.jobset.gate == gate else (SetGate(gate, reason, message),)

    def _leave_open(self) -> tuple[SetGate, ...]:
        """Suspended without a checkpoint: it may start again as it likes."""
        return () if self.jobset.gate == Suspend() else self._gate(Open())

    # ------------------------------------------------------------ another checkpoint is chosen

    def _choose(self) -> Decision | None:
        """What is to be done for the user's choice of a checkpoint; None where there is none, or it is taken up."""
        standing = [checkpoint for checkpoint in self.checkpoints if checkpoint.stands]
        chosen = [checkpoint for checkpoint in standing if checkpoint.use is Use.CHOSEN][-1:]
        if chosen and len(standing) > 1:
            return Decision(tuple(PassOver(c.name, chosen[0].name) for c in standing if c is not chosen[0]))
        choice, current = self.job.choice, self.current
        if choice is None or self.job.finished or self._suspended_in() != choice.current:
            return None
        if not choice.checkpoint:
            return Decision.to(RefuseChoice("that is no name of a checkpoint"))
        if current is not None and choice.checkpoint in (current.name, current.fork_of):
            return None
        found = next((c for c in self.checkpoints if c.name == choice.checkpoint), None)
        if found is None:
            return Decision.to(
                Fork(choice.checkpoint, self._serial()), again=RETRY
            )  # what refuses it is not ours to see
        if cause := unusable(found):
            return Decision.to(RefuseChoice(f"checkpoint {found.name} {cause}"))
        return Decision.to(Choose(found.name))

    def _suspended_in(self) -> str | None:
        """The checkpoint that it is suspended in, by its gate; "" for none, None for a job that is not suspended."""
        if not self.jobset.suspend:
            return None
        match self.jobset.gate:
            case Held(name):
                return name
            case Open() | Suspend("") if self.job.suspend:
                return ""
        return None

    # ------------------------------------------------------------ an operation is under way

    def _under_way(self, checkpoint: Checkpoint, operation: Operation) -> Decision:
        lost = lost_ranks(operation, self.view.pods)
        if operation.kind is Kind.RESTORE and self.jobset.restoring != operation.serial:
            return Decision.to(Mark(operation.serial))
        drive = Drive(checkpoint.name, operation.op, self._unwanted(checkpoint, operation), lost)
        if Verdict.RELEASE in operation.verdicts and not self.jobset.suspend:
            # The pods are to go, though the job may be wanted again by now: it comes back from the checkpoint.
            gate = Suspend(checkpoint.name) if self.job.suspend else Held(checkpoint.name)
            return Decision.to(drive, *self._gate(gate))
        return Decision.to(drive, again=self._until_timeout() if operation.kind is Kind.RELEASE else None)

    def _unwanted(self, checkpoint: Checkpoint, operation: Operation) -> bool:
        if checkpoint.deleting:
            return True
        match operation.kind:
            case Kind.RELEASE:
                return not self.job.suspend or self.job.discard or self._until_timeout() == 0
            case Kind.RESTORE:
                return self.job.suspend or self.jobset.suspend
            case _:
                return self.job.suspend and self.job.discard

    # ------------------------------------------------------------ to be suspended, and running

    def _suspend(self) -> Decision:
        if self.current is not None:
            return Decision(self._gate(Suspend(self.current.name)))
        if self.job.discard:
            return self._let_go("Discarded", "suspended without a checkpoint, as its annotation asks")
        if back := to_go_back_to(self.checkpoints, self.view.pods, range(self.jobset.ranks)):
            checkpoint, lost = back
            return Decision.to(GoBack(checkpoint.name, described(lost, self.view.pods)))
        if (silent := self._silent()) and self._until_timeout():
            text = f"the suspend waits for {on_silent_nodes(silent)}, which is not ready: lost if it stays so"
            return Decision.to(Tell("NodeNotReady", text), again=self._until_timeout())
        if stray := self._stray():
            return Decision.to(Word(stray))
        running, finished = self._gang()
        if not self._whole(running, finished):
            return self._let_go(*self._unsaved(running, finished))
        suspends = [c for c in self.checkpoints if c.kind is Kind.RELEASE and not c.deleting]
        latest = suspends[-1] if suspends else None
        if latest is not None and latest.waiting:
            if self.jobset.gate != Open():  # opened before the gang ran
                return Decision(self._gate(Open()))
            pods = tuple(running.values())
            return Decision.to(Begin(latest.name, self._serial(latest), Kind.RELEASE, pods, finished))
        return self._try(latest.failed if latest else None)

    def _let_go(self, reason: str, message: str) -> Decision:
        return Decision(self._give_up((Kind.RELEASE,), message) + self._gate(Suspend(), reason, message))

    def _silent(self) -> list[Pod]:
        """Those of which nothing can be asked now, and that are not given up yet."""
        return [pod for pod in self.view.pods if pod.running and pod.unready_since and not pod.terminating]

    def _unsaved(self, running: Mapping[int, Pod], finished: Sequence[int]) -> tuple[str, str]:
        """What the user is told where not all ranks run, and there is nothing to go back to: a reason, and words."""
        there = {pod.rank for pod in self.view.pods if not pod.terminating}
        lost = sorted({pod.rank for pod in self.view.pods if pod.terminating} - there - set(finished))
        began = running or any(pod.lost for pod in self.view.pods)
        if began and lost and last(self.checkpoints) is None:
            text = f"{described(lost, self.view.pods)}, and the training has no complete checkpoint: it begins anew"
            return "StartedFresh", f"{text} when it is resumed"
        return "NothingToSave", f"suspended without a checkpoint: {self._missing(running, finished)}"

    def _gang(self) -> tuple[dict[int, Pod], tuple[int, ...]]:
        """The pods of the ranks that run, and the ranks that have ended with 0."""
        pods = self.view.pods
        finished = {pod.rank for pod in pods if pod.succeeded}
        running = {pod.rank: pod for pod in pods if pod.running and not pod.terminating and pod.rank not in finished}
        return dict(sorted(running.items())), tuple(sorted(finished))

    def _whole(self, running: Mapping[int, Pod], finished: Sequence[int]) -> bool:
        return bool(running) and {*running, *finished} >= set(range(self.jobset.ranks))

    def _missing(self, running: Mapping[int, Pod], finished: Sequence[int]) -> str:
        missing = sorted(set(range(self.jobset.ranks)) - set(running) - set(finished))
        return f"ranks {missing} do not run" if running else "nothing of it runs"

    def _try(self, failed: Failed | None) -> Decision:
        """Another checkpoint, unless the attempts for this suspend have used its time up."""
        if failed is None or failed.at < self.job.since - 1:  # the API's times are whole seconds
            return Decision.to(Create(self._serial()))
        left = self._until_timeout()
        if left == 0 or (failed.refused and self.view.policy.suspend_anyway):
            if self.view.policy.suspend_anyway:
                return self._let_go("SuspendedWithoutCheckpoint", f"it cannot be checkpointed: {failed.message}")
            return WAIT  # it runs on; the failed checkpoint says why
        ready = failed.at + (RETRY_REFUSED if failed.refused else RETRY) - self.view.now
        return Decision.to(Create(self._serial())) if ready <= 0 else Decision.to(again=min(ready, left))

    def _until_timeout(self) -> float:
        """Seconds for which the suspend may still be held back; 0 if that time is over."""
        return max(0.0, self.job.since + self.view.policy.timeout - self.view.now)

    # ------------------------------------------------------------ suspended

    def _suspended(self) -> Decision:
        given_up = self._give_up((Kind.RELEASE,), "the job is suspended already")
        if self.current is not None:
            return Decision(given_up + self._gate(Held(self.current.name)))
        return Decision(given_up + (() if isinstance(self.jobset.gate, Held) else self._leave_open()))

    # ------------------------------------------------------------ to be resumed

    def _resume(self) -> Decision:
        gate, current = self.jobset.gate, self.current
        if given_up := self._give_up((Kind.RELEASE,), "the job is no longer to be suspended"):
            return Decision(given_up)
        if isinstance(gate, Resume) and (gate.stamp is None or (current and gate.stamp.uid == current.uid)):
            return WAIT  # Trainer resumes it now
        if current is None:
            return self._resume_without() if isinstance(gate, Held) else Decision(self._leave_open())
        if gate != Held(current.name):
            return Decision(self._gate(Held(current.name)))
        if former := [pod for pod in self.view.pods if not pod.succeeded and not pod.failed]:
            return self._wait_for(former)
        if current.use is Use.FAILED and self.view.policy.start_fresh:
            return Decision.to(StartFresh(current.name))
        if current.use is Use.FAILED and current.seen >= self.job.generation:
            return WAIT  # until the user says something else
        if current.local:
            return WAIT  # until the registry has it: its pods may come to any node
        return Decision.to(OpenResume(current.name, self._serial()))

    def _wait_for(self, former: Sequence[Pod]) -> Decision:
        """Until the last pod of the former incarnation has ended: no rank may run twice."""
        lost = [pod for pod in former if pod.lost]
        if not lost:
            return WAIT
        text = (
            f"not resumed yet: {on_silent_nodes(lost)}, which is not ready, may still run. Bring the node back; or,"
            " once it surely is off, delete it, or taint it with node.kubernetes.io/out-of-service:NoExecute"
        )
        return Decision.to(Tell("WaitingForNode", text))

    def _resume_without(self) -> Decision:
        """Held for a checkpoint that is no more, or has been used."""
        assert isinstance(self.jobset.gate, Held)
        name = self.jobset.gate.checkpoint
        gone = all(checkpoint.name != name or checkpoint.deleting for checkpoint in self.checkpoints)
        if gone and not self.view.policy.start_fresh:
            return WAIT
        what = "is no more" if gone else "was given up"
        return Decision(self._gate(Resume(), "StartedFresh", f"the training begins anew: its checkpoint {name} {what}"))

    # ------------------------------------------------------------ running, or coming back

    def _run(self) -> Decision:
        current = self.current
        if current is None:
            return self._running()
        generation = self._generation(current)
        if generation == 0:  # it still is what was released
            return Decision(self._gate(Held(current.name)))
        restore = current.restore
        refused = current.use is Use.FAILED and current.seen >= self.job.generation
        if refused or (restore is not None and restore.serial == generation):
            return self._not_restored(current)
        assert current.operation is not None
        found = self._placeholders(Incarnation(current.uid, generation))
        pods = tuple(found[rank] for rank in sorted(current.operation.pods) if rank in found)
        if len(pods) < len(current.operation.pods) or self.jobset.gate != Open():
            return Decision(self._gate(Open()))
        return Decision.to(BeginRestore(current.name, generation, pods))

    def _generation(self, current: Checkpoint) -> int:
        """Of the restore that the JobSet was resumed for; 0 if it was not resumed from this checkpoint."""
        stamp = self.jobset.incarnation
        return stamp.generation if stamp is not None and stamp.checkpoint == current.uid else 0

    def _placeholders(self, incarnation: Incarnation) -> dict[int, Pod]:
        return {
            pod.rank: pod
            for pod in self.view.pods
            if pod.incarnation == incarnation and pod.running and not pod.terminating
        }

    def _not_restored(self, current: Checkpoint) -> Decision:
        """The restore came to nothing: all ranks together back to being suspended, or to the beginning."""
        if current.use is Use.FAILED and self.view.policy.start_fresh:
            return Decision.to(StartFresh(current.name))
        return Decision(self._gate(Held(current.name)))

    def _running(self) -> Decision:
        given_up = self._give_up((Kind.RELEASE,), "the job is no longer to be suspended")
        if opened := self._gate(Open()):  # first: a suspend would pass while another checkpoint is taken
            return Decision(given_up + opened)
        actions = given_up
        if stray := self._stray():
            return Decision((*actions, Word(stray)))
        running, finished = self._gang()
        asked = next((c for c in self.checkpoints if c.waiting and c.kind is Kind.CONTINUE and not c.deleting), None)
        if asked is not None and self._whole(running, finished):
            begin = Begin(asked.name, self._serial(asked), Kind.CONTINUE, tuple(running.values()), finished)
            return Decision((*actions, begin))
        return Decision(actions)

    def _stray(self) -> tuple[Pod, ...]:
        """Placeholders that wait for nothing: they were not there when their gang was restored, or the checkpoint was
        given up."""
        return tuple(pod for pod in self.view.pods if pod.running and not pod.terminating and self._is_stray(pod))

    def _is_stray(self, pod: Pod) -> bool:
        if pod.incarnation is None or pod.told:
            return False
        origin = next((c for c in self.checkpoints if c.uid == pod.incarnation.checkpoint), None)
        restore = origin.restore if origin is not None and origin.use is Use.RESTORED else None
        return restore is None or pod.uid not in restore.pods.values()
