"""What the protocol acts on: trees, network locks, devices, captures; and what must never be seen there.

A seat is one rank's container on a node of its own. A checkpoint acts on the seats of the running incarnation, each
restore on new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stasis.core.plan import Kind, Outcome, Spec
from stasis.core.records import Failure, Record, Verdict, decision_key, end_key, release_key, restored_key
from stasis.core.steps import Step

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

NONE, RUNNING, FROZEN, DEAD = "none", "running", "frozen", "dead"
FREE, LOCKED, SAVED = "free", "locked", "saved"

UNDOES = frozenset({Step.UNLOCK_NETWORK, Step.THAW, Step.RESTORE_DEVICES, Step.UNLOCK_DEVICES, Step.REBUILD})
# No rank begins the one before every rank is through the other.
BARRIERS = {
    Step.QUIESCE: Step.PREPARE,
    Step.LOCK_DEVICES: Step.QUIESCE,
    Step.SAVE_DEVICES: Step.LOCK_DEVICES,
    Step.FREEZE: Step.SAVE_DEVICES,
    Step.DRAIN: Step.FREEZE,
    Step.LOCK_NETWORK: Step.DRAIN,
    Step.CAPTURE: Step.LOCK_NETWORK,
    Step.STORE: Step.CAPTURE,
    Step.LAY: Step.PLACE,
    Step.RESTORE: Step.LAY,
    Step.RELEASE_NETWORK: Step.RESTORE,
    Step.POKE_NETWORK: Step.RELEASE_NETWORK,
}
AWAKE = {Step.THAW: Step.POKE_NETWORK, Step.UNLOCK_DEVICES: Step.RESTORE_DEVICES}  # of a restore
ALWAYS = frozenset({Step.RELEASE, Step.CONTINUE, Step.TEAR_DOWN, Step.PLACE, Step.LAY, Step.RESTORE})


class Violation(AssertionError):
    """An invariant does not hold. `name` says which."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class StepError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Seat:
    """A rank's container and its node."""

    def __init__(self, home: str, rank: int, base: float) -> None:
        self.home = home  # the operation that made it, or "start"
        self.rank = rank
        self.name = f"{home}#{rank}"
        self.base = base  # of the node's clock
        self.boot = 1
        self.up = True
        self.deleted = False
        self.tree = NONE
        self.status: int | None = None
        self.source = ""  # the manifest it was restored from
        self.through: set[tuple[str, int, Step]] = set()  # steps that it carried out once: op, attempt, step
        self.attempt = 0
        self.freeze = 0  # counts the freezes
        self.locked = False
        self.laid = False
        self.parked = False
        self.reserved = False
        self.device = FREE
        self.late: list[Step] = []  # device calls that were given up and still happen
        self.capturing = ""
        self.captured = ""
        self.stored: set[str] = set()
        # What survives the agent.
        self.journal: dict[str, Any] | None = None
        self.fates: dict[str, str] = {}  # of each operation's freeze: who claimed it, "" where nobody has
        self.guarded_op = ""
        self.seen_epoch = 0
        self.cut_until = 0.0

    @property
    def voted(self) -> bool:
        return self.fates.get(self.guarded_op) == "voted"

    def claim(self, op: str, value: str) -> str:
        self.fates[op] = self.fates.get(op) or value
        return self.fates[op]

    @property
    def alive(self) -> bool:
        return self.tree in (RUNNING, FROZEN)


class World:
    """Carries steps out on seats and checks what they do."""

    def __init__(self, sim: Simulation, *, devices: bool) -> None:
        self.sim = sim
        self.devices = devices
        self.cut: dict[str, dict[int, bool]] = {}  # op -> rank -> its capture is part of a consistent cut

    def others(self, spec: Spec) -> list[Seat]:
        return [self.sim.seat_of(spec.op, rank) for rank in spec.ranks]

    # ------------------------------------------------------------ transitions that are checked

    def run(self, seat: Seat, why: str) -> None:
        """The tree of `seat` begins to run again."""
        if seat.tree != FROZEN:
            return
        for other in self.sim.seats.values():
            if other.rank == seat.rank and other is not seat and other.alive:
                raise Violation("one place", f"{seat.name} runs while {other.name} is {other.tree}")
        if seat.source and seat.freeze == 0:
            self._check_restored(seat)
        if seat.voted:
            op, records = seat.guarded_op, self.sim.records
            decision, release = records.get(decision_key(op)), records.get(release_key(op))
            aborted = decision is not None and decision.verdict is Verdict.ABORT
            if not aborted and (release is None or release.verdict is not Verdict.CONTINUE):
                raise Violation("bound by its vote", f"{seat.name} thawed ({why}) without a recorded Abort or Continue")
        seat.tree = RUNNING
        seat.freeze += 1
        self._spoil(seat)

    def _check_restored(self, seat: Seat) -> None:
        spec = self.sim.program.specs[seat.home]
        record = self.sim.records.get(restored_key(spec.op, seat.attempt))
        if record is None or record.verdict is not Verdict.RESTORED:
            raise Violation("one place", f"{seat.name} runs without a recorded Restored of attempt {seat.attempt}")
        if any(other.locked for other in self.others(spec)):
            raise Violation("barrier", f"{seat.name} runs while the network of another rank is locked")
        commit = self.sim.records.get(decision_key(spec.checkpoint))
        if commit is None or commit.verdict is not Verdict.COMMIT:
            raise Violation("one checkpoint", f"{seat.name} restored from {spec.checkpoint}, which is not committed")
        if commit.manifests.get(seat.rank) != seat.source:
            raise Violation("one checkpoint", f"{seat.name} restored from {seat.source}, not of {spec.checkpoint}")

    def _spoil(self, seat: Seat) -> None:
        """Captures that are going on while another rank acts, or could, are not parts of one consistent cut."""
        for other in self.sim.seats.values():
            if other.capturing and self.sim.takes_part(other.capturing, seat):
                self.cut[other.capturing][other.rank] = False

    def kill(self, seat: Seat, status: int) -> None:
        """The tree ends, whoever ended it."""
        if seat.alive:
            seat.tree, seat.status = DEAD, status
            seat.device = FREE
            seat.late.clear()
            self._spoil(seat)

    def freeze(self, seat: Seat, spec: Spec) -> None:
        if seat.tree == RUNNING:
            if not self.sim.guarded(seat, spec.op):
                raise Violation("guarded", f"{seat.name} is frozen without a guardian")
            seat.tree = FROZEN
            seat.freeze += 1
            self.sim.watch_freeze(seat, spec.timing.frozen)

    def crash(self, seat: Seat) -> None:
        """The node restarts: its processes and namespaces are gone, its disk is not."""
        self.kill(seat, -1)
        seat.locked = seat.laid = seat.parked = seat.reserved = False
        seat.captured = seat.capturing = ""
        seat.device = FREE
        seat.late.clear()
        seat.boot += 1

    # ------------------------------------------------------------ steps

    def begin(self, seat: Seat, step: Step, op: str, attempt: int) -> None:
        spec = self.sim.program.specs[op]
        before = BARRIERS.get(step) or (AWAKE.get(step) if spec.kind is Kind.RESTORE else None)
        if before is not None and seat.alive:
            for other in self.others(spec):
                if (op, attempt, before) not in other.through and (other.alive or step in BARRIERS):
                    raise Violation("barrier", f"{seat.name} begins {step}, {other.name} is not through {before}")
        if step is Step.CAPTURE:
            seat.capturing = op
            whole = all(other.tree == FROZEN and other.locked for other in self.others(spec))
            cut = self.cut.setdefault(op, {})
            cut[seat.rank] = whole and cut.get(seat.rank, True)

    def finish(self, seat: Seat, step: Step, op: str, attempt: int, args: Mapping[str, Any]) -> dict[str, Any]:
        """Have `step`'s effect; its result. Raises StepError."""
        if seat.deleted:
            return {}
        spec = self.sim.program.specs[op]
        if not seat.alive and step not in ALWAYS and (step not in UNDOES or spec.kind is Kind.RESTORE):
            status = -1 if seat.status is None else seat.status
            raise StepError(Failure("RankExited", "the tree is gone", "", seat.rank, step, False, {"status": status}))
        seat.through.add((op, attempt, step))
        result: dict[str, Any] | None = getattr(self, "_" + step.replace("-", "_"))(seat, spec, attempt, args)
        return result or {}

    def _prepare(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> dict[str, Any]:
        seat.reserved = True
        return {"root": {"pid": 7, "start": seat.boot}}

    def _quiesce(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        seat.parked = True

    def device_call_hangs(self, seat: Seat, step: Step) -> bool:
        device = step in (Step.LOCK_DEVICES, Step.SAVE_DEVICES, Step.RESTORE_DEVICES)
        return self.devices and device and seat.tree == FROZEN

    def _lock_devices(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        if self.devices and seat.device == FREE:
            seat.device = LOCKED

    def _save_devices(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        if seat.device == LOCKED:
            seat.device = SAVED

    def _restore_devices(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> dict[str, Any]:
        if seat.device == SAVED:
            seat.device = LOCKED
        return {"unsettled": bool(seat.late)}

    def _unlock_devices(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> dict[str, Any]:
        if seat.device == LOCKED:
            seat.device = FREE
        return {"unsettled": bool(seat.late)}

    def happen_late(self, seat: Seat, step: Step) -> bool:
        """A given-up device call takes effect, unless the process is frozen."""
        if step not in seat.late:
            return True
        if seat.tree == FROZEN:
            return False
        seat.late.remove(step)
        if seat.tree == RUNNING:
            if step is Step.LOCK_DEVICES and seat.device == FREE:
                seat.device = LOCKED
            elif step is Step.SAVE_DEVICES and seat.device == LOCKED:
                seat.device = SAVED
        return True

    def _freeze(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        self.freeze(seat, spec)

    def _drain(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        pass

    def _lock_network(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> dict[str, Any]:
        seat.locked = True
        return {"in_flight": int(self.sim.rng.random() < 0.2)}

    def _capture(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        seat.capturing, seat.captured = "", spec.op

    def unlock(self, seat: Seat) -> None:
        if seat.locked:
            seat.locked = False
            self._spoil(seat)

    def _unlock_network(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        self.unlock(seat)

    def _thaw(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        self.run(seat, "thaw")

    def _store(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> dict[str, Any]:
        if seat.captured != spec.op:
            raise StepError(Failure("CheckpointFailed", "nothing was captured", "", seat.rank, "store"))
        if args.get("peers") != list(spec.ranks):
            raise Violation("complete commit", f"{seat.name} stores without the caller's word on all captures")
        seat.stored.add(spec.op)
        return {"manifest": f"{spec.op}/{seat.rank}"}

    def _release(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        records = self.sim.records
        decision, release = records.get(decision_key(spec.op)), records.get(release_key(spec.op))
        committed = decision is not None and decision.verdict is Verdict.COMMIT
        if not committed or release is None or release.verdict is not Verdict.RELEASE:
            raise Violation("no early kill", f"{seat.name} is killed without recorded Commit and Release of {spec.op}")
        self.kill(seat, 137)
        seat.locked = seat.parked = seat.reserved = False
        seat.captured = seat.capturing = ""

    def _continue(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        seat.reserved = False
        seat.captured = seat.capturing = ""

    def _rebuild(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        seat.parked = False

    def _place(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        if seat.tree != NONE or seat.laid:
            raise Violation("clean placeholder", f"{seat.name}: attempt {attempt} finds a tree that is {seat.tree}")

    def _lay(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        seat.laid = seat.locked = True

    def _restore(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        if seat.tree != NONE:
            raise Violation("clean placeholder", f"{seat.name}: restored over a tree that is {seat.tree}")
        if not seat.laid:
            raise StepError(Failure("RestoreFailed", "nothing is laid", "", seat.rank, "restore"))
        seat.tree, seat.source, seat.attempt, seat.freeze = FROZEN, args["manifest"], attempt, 0
        seat.device = SAVED if self.devices else FREE
        seat.parked = True

    def _release_network(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        seat.locked = False

    def _poke_network(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        pass

    def _tear_down(self, seat: Seat, spec: Spec, attempt: int, args: Mapping[str, Any]) -> None:
        record = self.sim.records.get(restored_key(spec.op, attempt))
        if seat.alive and record is not None and record.verdict is Verdict.RESTORED:
            raise Violation("no early kill", f"{seat.name} is torn down though attempt {attempt} is recorded Restored")
        seat.tree, seat.status, seat.source, seat.attempt = NONE, None, "", 0
        seat.laid = seat.locked = seat.parked = False
        seat.device = FREE
        seat.late.clear()

    # ------------------------------------------------------------ records and the end

    def check_record(self, record: Record) -> None:
        """Called for each record that is newly there."""
        spec = self.sim.program.specs[record.op]
        if record.verdict is not Verdict.ENDED and end_key(record.op) in self.sim.records:
            raise Violation("settled", f"{record.verdict} of {record.op} is recorded after its end")
        if record.verdict is Verdict.COMMIT:
            cut = self.cut.get(spec.op, {})
            for rank in spec.ranks:
                if spec.op not in self.sim.seat_of(spec.op, rank).stored or record.manifests.get(rank) is None:
                    raise Violation("complete commit", f"{spec.op} is committed, rank {rank} is not complete")
                if not cut.get(rank):
                    raise Violation("consistent cut", f"{spec.op}: rank {rank} was captured while others could act")
            if set(record.ranks) | set(record.finished) != set(range(self.sim.size)):
                raise Violation("complete commit", f"{spec.op}: {record.ranks} and {record.finished} are not the gang")
        elif record.verdict is Verdict.RELEASE:
            for rank in spec.ranks:
                if self.sim.seat_of(spec.op, rank).tree == RUNNING:
                    raise Violation("frozen until released", f"{spec.op}: rank {rank} ran on after its capture")
        elif record.verdict is Verdict.ENDED:
            for rank in spec.ranks:
                self._check_ended(self.sim.seat_of(spec.op, rank), Outcome(record.outcome))

    def _check_ended(self, seat: Seat, outcome: Outcome) -> None:
        if seat.deleted:
            return
        gone = outcome in (Outcome.RELEASED, Outcome.ABANDONED)
        if gone and seat.alive:
            raise Violation("settled", f"ended as {outcome}, and {seat.name} is {seat.tree}")
        if outcome is not Outcome.BROKEN:
            self.check_free(seat, f"ended as {outcome}")

    def check_free(self, seat: Seat, when: str) -> None:
        """Nothing is left frozen, locked, parked or reserved."""
        if seat.tree == FROZEN:
            raise Violation("no frozen tree", f"{when}, and {seat.name} is frozen")
        if seat.tree != DEAD and seat.locked:
            raise Violation("no network lock", f"{when}, and {seat.name} is locked")
        if seat.tree == RUNNING and (seat.device != FREE or seat.late or seat.parked):
            raise Violation("no device lock", f"{when}; {seat.name}: {seat.device}, late {seat.late}, {seat.parked}")
        if seat.reserved:
            raise Violation("no reservation", f"{when}, and {seat.name} holds its reservation")
