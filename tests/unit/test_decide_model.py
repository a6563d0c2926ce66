"""`decide` and the gate in a small world: a user who changes his mind, Trainer, the Job controller, kubelets, two
controllers with views as old as they happen to be, operations that fail, nodes that die. In any order of all that, no
training step is lost or done twice, but those that a node took along after the last checkpoint, and when everybody is
left alone what the user asked for last is what is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from stasis.core import actions as a
from stasis.core.decide import decide
from stasis.core.gate import Gate, Open, Resume, Stamp, Suspend, admit
from stasis.core.plan import Kind, Outcome
from stasis.core.records import Verdict
from stasis.core.view import Checkpoint, Failed, Incarnation, Job, JobSet, Operation, Pod, Policy, Use, View

RANKS = 2
STEPS = 250
CALM = 500  # steps in which all must settle
LOST_AFTER, COLLECTED_AFTER = 20.0, 60.0  # seconds, a step each: from a node's death


@dataclass
class Container:
    pod: Pod
    program: str  # waiting, running, frozen, ended
    count: int = 0

    @property
    def silent(self) -> bool:
        return bool(self.pod.unready_since)


@dataclass
class World:
    rng: random.Random
    now: float = 0.0
    job: Job = field(default_factory=lambda: Job("j", False, 1))
    jobset: JobSet = field(default_factory=lambda: JobSet(False, RANKS))
    versions: dict[str, int] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    images: dict[tuple[str, int], int] = field(default_factory=dict)  # operation, rank -> count
    led: dict[str, set[str]] = field(default_factory=dict)  # operation -> what its coordinators were told
    lines: dict[int, list[int]] = field(default_factory=lambda: {rank: [] for rank in range(RANKS)})
    made: int = 0
    back: set[str] = field(default_factory=set)  # checkpoints to which a gang went back that had lost ranks
    deaths: bool = False
    faults: bool = True
    told: list[str] = field(default_factory=list)  # what happened, for a schedule that failed

    # ------------------------------------------------------------ views and writes

    def view(self) -> tuple[View, dict[str, int]]:
        pods = tuple(container.pod for container in self.containers.values())
        checkpoints = sorted(self.checkpoints.values(), key=lambda c: (c.serial == 0, c.serial))
        policy = Policy(lost_after=LOST_AFTER)
        return View(self.now, self.job, self.jobset, pods, tuple(checkpoints), policy), dict(self.versions)

    def write_jobset(self, suspend: bool, gate: Gate) -> None:
        before = self.jobset
        admitted = admit(gate, was=before.suspend, wanted=suspend)
        incarnation = before.incarnation
        if admitted.stamps is not None:
            stamp = Stamp.of(admitted.stamps)
            incarnation = Incarnation(stamp.uid, stamp.generation) if stamp else None
        self.jobset = replace(before, suspend=admitted.suspend, gate=admitted.gate, incarnation=incarnation)
        if admitted.gate == Suspend() and admitted.suspend:
            self.job_controller()  # nothing is saved: how far it comes until it is deleted does not matter
        if self.jobset != before:
            self.told.append(f"{self.now} {self.jobset}")
            self.versions["jobset"] = self.versions.get("jobset", 0) + 1

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.told.append(f"{self.now} {checkpoint}")
        self.checkpoints[checkpoint.name] = checkpoint
        self.versions[checkpoint.name] = self.versions.get(checkpoint.name, 0) + 1

    # ------------------------------------------------------------ others

    def user(self) -> None:
        wanted = not self.job.suspend
        self.job = replace(self.job, suspend=wanted, generation=self.job.generation + 1, since=self.now)
        self.told.append(f"{self.now} {self.job}")

    def node_dies(self) -> None:
        """While something is asked for. What runs on is not ours to suspend: that ranks of it are lost is found by
        others."""
        under_way = [o for c in self.checkpoints.values() for o in c.operations if o.under_way]
        restoring = any(o.kind is Kind.RESTORE and Verdict.RESTORED not in o.verdicts for o in under_way)
        there = [c for c in self.containers.values() if c.pod.running and not c.silent]
        if not there or not (restoring or (self.job.suspend and not self.jobset.suspend)):
            return
        container = self.rng.choice(there)
        container.pod = replace(container.pod, unready_since=self.now, node="n")
        container.program = "ended"
        self.told.append(f"{self.now} the node of {container.pod.uid} dies")
        self.versions["jobset"] = self.versions.get("jobset", 0) + 1

    def collector(self) -> None:
        """Removes the pods of nodes that are deleted."""
        for uid, container in list(self.containers.items()):
            if container.silent and self.now > container.pod.unready_since + COLLECTED_AFTER:
                del self.containers[uid]

    def trainer(self) -> None:
        self.write_jobset(self.job.suspend, self.jobset.gate)

    def job_controller(self) -> None:
        if self.jobset.suspend:
            for container in self.containers.values():
                container.pod = replace(container.pod, terminating=True)
            return
        there = {container.pod.rank for container in self.containers.values()}
        for rank in set(range(RANKS)) - there:
            self.made += 1
            uid = f"p{self.made}"
            self.containers[uid] = Container(Pod(rank, uid, uid, incarnation=self.jobset.incarnation), "")

    def kubelet(self) -> None:
        if not self.containers:
            return
        uid = self.rng.choice(sorted(self.containers))
        container = self.containers[uid]
        if container.silent:
            return
        if container.pod.terminating:
            if container.program == "frozen" and not self.released(uid):
                return
            del self.containers[uid]
        elif not container.pod.running:
            container.pod = replace(container.pod, running=True)
            container.program = "waiting" if container.pod.incarnation else "running"
            if container.program == "running":
                self.lines[container.pod.rank] = []  # anew
            self.versions["jobset"] = self.versions.get("jobset", 0) + 1  # its status counts the pods that are ready

    def released(self, uid: str) -> bool:
        return any(
            Verdict.RELEASE in operation.verdicts and uid in operation.pods.values()
            for checkpoint in self.checkpoints.values()
            for operation in checkpoint.operations
        )

    def training(self) -> None:
        """A step is one of all ranks together. Before the gate is shut again behind a gang that did not run when it was
        opened, what it does is given away."""
        if self.jobset.gate == Suspend():
            return
        there = (container for container in self.containers.values() if not container.pod.terminating)
        running = {container.pod.rank: container for container in there if container.program == "running"}
        if len(running) == RANKS and len({c.count for c in running.values()}) == 1:
            for rank, container in running.items():
                container.count += 1
                self.lines[rank].append(container.count)
                self.told.append(f"{self.now} step {rank} {container.pod.uid} {container.count}")

    # ------------------------------------------------------------ operations, as the protocol carries them out

    def protocol(self) -> None:
        """One step of some operation that has a coordinator."""
        under_way = [
            (c, o) for c in self.checkpoints.values() for o in c.operations if o.under_way and o.op in self.led
        ]
        if not under_way:
            return
        checkpoint, operation = self.rng.choice(under_way)
        told = self.led[operation.op]
        verdicts = operation.verdicts
        containers = {rank: self.containers.get(uid) for rank, uid in operation.pods.items()}
        silent = any(container is not None and container.silent for container in containers.values())
        if silent and "lost" not in told:
            return  # nobody answers for it
        containers = {rank: None if c is not None and c.silent else c for rank, c in containers.items()}
        lost = any(container is None or container.program == "ended" for container in containers.values())
        if operation.kind is Kind.RESTORE:
            if lost or "withdraw" in told or self.fails():
                self.tear_down(containers)
                self.end(checkpoint, operation, Outcome.ABANDONED)
                return
            for rank, container in containers.items():
                assert container is not None
                assert container.program == "waiting"
                container.program, container.count = "running", self.images[checkpoint.uid, rank]
                if checkpoint.name in self.back:
                    self.lines[rank] = self.lines[rank][: container.count]
            self.end(checkpoint, operation, Outcome.RESTORED, Verdict.RESTORED)
        elif Verdict.COMMIT not in verdicts:
            frozen = [c for c in containers.values() if c is not None and c.program == "frozen"]
            if lost or "withdraw" in told or self.fails():
                self.thaw(containers)
                self.end(checkpoint, operation, Outcome.ABORTED, Verdict.ABORT)
            elif len(frozen) < RANKS:
                for container in containers.values():
                    assert container is not None
                    assert container.program == "running", container
                    container.program = "frozen"
            else:
                for rank, container in containers.items():
                    assert container is not None
                    self.images[checkpoint.uid, rank] = container.count
                self.record(checkpoint, operation, Verdict.COMMIT)
        elif not verdicts & {Verdict.RELEASE, Verdict.CONTINUE}:
            go_on = operation.kind is Kind.CONTINUE or ("withdraw" in told and not lost)
            self.record(checkpoint, operation, Verdict.CONTINUE if go_on else Verdict.RELEASE)
        elif Verdict.CONTINUE in verdicts:
            self.thaw(containers)
            self.end(checkpoint, operation, Outcome.CONTINUED)
        elif all(container is None for container in containers.values()):
            self.end(checkpoint, operation, Outcome.RELEASED)

    def fails(self) -> bool:
        return self.faults and self.rng.random() < 0.1

    def thaw(self, containers: dict[int, Container | None]) -> None:
        for container in containers.values():
            if container is not None and container.program == "frozen":
                container.program = "running"

    def tear_down(self, containers: dict[int, Container | None]) -> None:
        for container in containers.values():
            assert container is None or container.program in ("waiting", "ended")

    def record(self, checkpoint: Checkpoint, operation: Operation, *verdicts: Verdict) -> None:
        self.put(checkpoint, replace(operation, verdicts=operation.verdicts | set(verdicts)))

    def end(self, checkpoint: Checkpoint, operation: Operation, outcome: Outcome, *verdicts: Verdict) -> None:
        verdicts = (*verdicts, Verdict.ENDED)
        self.put(checkpoint, replace(operation, verdicts=operation.verdicts | set(verdicts), outcome=outcome))

    def put(self, checkpoint: Checkpoint, operation: Operation, **more: object) -> None:
        which = "restore" if operation.kind is Kind.RESTORE else "operation"
        self.write_checkpoint(replace(checkpoint, **{which: operation}, **more))  # type: ignore[arg-type]

    # ------------------------------------------------------------ a controller

    def carry_out(self, action: a.Action, view: View, versions: dict[str, int]) -> None:
        """As the reconciler does; refused where the object is no longer the one that was seen."""
        name = getattr(action, "checkpoint", "jobset")
        if name != "jobset" and name not in self.checkpoints:
            return
        if not isinstance(action, a.Create | a.Word) and self.versions.get(name, 0) != versions.get(name, 0):
            return
        match action:
            case a.Create(serial):
                if f"gpt-{serial}" not in self.checkpoints:
                    self.write_checkpoint(Checkpoint(f"gpt-{serial}", f"c{serial}", "j", Kind.RELEASE))
            case a.Begin(_, serial, kind, pods):
                checkpoint = self.checkpoints[name]
                self.begin(checkpoint, Operation(checkpoint.uid, serial, kind, {p.rank: p.uid for p in pods}))
            case a.BeginRestore(_, serial, pods):
                checkpoint = self.checkpoints[name]
                op = f"{checkpoint.uid}-r{serial}"
                self.begin(checkpoint, Operation(op, serial, Kind.RESTORE, {p.rank: p.uid for p in pods}))
            case a.Drive(_, op, withdraw, lost):
                self.led.setdefault(op, set()).update({"withdraw"} if withdraw else (), {"lost"} if lost else ())
            case a.GoBack(_, _):
                self.back.add(name)
                self.write_checkpoint(replace(self.checkpoints[name], use=Use.CHOSEN))
            case a.Tell():
                pass
            case a.Conclude(_, op):
                self.conclude(self.checkpoints[name], op)
            case a.SetGate(gate):
                if action.reason in ("NothingToSave", "StartedFresh"):
                    assert not self.whole(view), "a gang that runs was suspended without a checkpoint"
                self.write_jobset(self.jobset.suspend, gate)
            case a.Mark(generation):
                self.jobset = replace(self.jobset, restoring=generation)
                self.versions["jobset"] = self.versions.get("jobset", 0) + 1
            case a.OpenResume(_, generation):
                checkpoint = self.checkpoints[name]
                if self.versions.get("jobset", 0) == versions.get("jobset", 0):
                    self.write_jobset(self.jobset.suspend, Resume(Stamp(name, checkpoint.uid, generation)))
            case a.Fail(_, message):
                self.write_checkpoint(replace(self.checkpoints[name], failed=Failed(self.now, message)))
            case a.Publish():
                self.write_checkpoint(replace(self.checkpoints[name], published=True))
            case a.Expire():
                self.write_checkpoint(replace(self.checkpoints[name], deleting=True))
            case a.LetGo():
                assert self.checkpoints[name].use is not Use.UNUSED or self.checkpoints[name].failed, "it is needed"
                del self.checkpoints[name]
            case a.Word(pods):
                for pod in pods:
                    if (container := self.containers.get(pod.uid)) is not None and container.program == "waiting":
                        container.program = "running"
                        container.pod = replace(container.pod, told=True)
            case _:
                raise AssertionError(action)

    def whole(self, view: View) -> bool:
        there = (pod for pod in view.pods if pod.running and not pod.terminating and not pod.unready_since)
        return len({pod.rank for pod in there if pod.incarnation is None}) == RANKS

    def begin(self, checkpoint: Checkpoint, operation: Operation) -> None:
        others = [o for c in self.checkpoints.values() for o in c.operations if o.under_way]
        assert not others, f"{operation} beside {others}"
        self.put(checkpoint, operation, serial=checkpoint.serial or operation.serial)

    def conclude(self, checkpoint: Checkpoint, op: str) -> None:
        operation = next(o for o in checkpoint.operations if o.op == op)
        operation = replace(operation, concluded=True)
        match operation.outcome:
            case Outcome.ABORTED:
                self.put(checkpoint, operation, failed=Failed(self.now, "failed"))
            case Outcome.RESTORED:
                self.put(checkpoint, operation, use=Use.RESTORED)
            case _:
                self.put(checkpoint, operation)

    # ------------------------------------------------------------ all together

    def run(self) -> None:
        views = [self.view(), self.view()]
        actors: list[Callable[[], None]] = [
            self.trainer, self.job_controller, self.kubelet, self.kubelet, self.training, self.protocol, self.protocol,
            self.collector,
        ]  # fmt: skip
        for step in range(STEPS + CALM):
            calm = step >= STEPS
            self.faults = not calm
            self.now += 1.0
            which = self.rng.randrange(len(views))
            if calm or self.rng.random() < 0.5:
                views[which] = self.view()
            silent = any(container.silent for container in self.containers.values())
            if not calm and not silent and self.rng.random() < 0.04:
                self.user()
            if not calm and self.deaths and self.rng.random() < 0.05:
                self.node_dies()
            if not calm and self.rng.random() < 0.03:
                self.led.clear()  # the leader is killed
            actions = decide(views[which][0]).actions
            if actions and self.rng.random() < 0.7:
                action = self.rng.choice(actions)
                self.told.append(f"{self.now} {which}: {action}")
                self.carry_out(action, *views[which])
            self.rng.choice(actors)()
            for lines in self.lines.values():
                assert lines == list(range(1, len(lines) + 1)), "\n".join(self.told[-60:])


@pytest.mark.parametrize("deaths", [False, True], ids=["nodes-live", "nodes-die"])
@pytest.mark.parametrize("seed", range(120))
def test_no_step_is_lost_or_done_twice_and_at_last_it_is_as_the_user_asked(seed: int, deaths: bool) -> None:
    world = World(random.Random(seed), deaths=deaths)
    world.run()
    if world.job.suspend:
        assert world.jobset.suspend, world
        assert not world.containers
    else:
        assert world.jobset.gate == Open(), world
        assert [c.program for c in world.containers.values()] == ["running"] * RANKS, world
