"""The phase of a TrainJob, from what the API has of it; and how it is shown."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from stasis.api import names
from stasis.api.v1alpha1 import TrainJobCheckpoint
from stasis.plugin import show
from stasis.plugin.options import duration
from stasis.plugin.snapshot import Snapshot
from stasis.plugin.standing import Phase, Standing, standing


def checkpoint(name: str, *, kind: str = "Suspend", **status: Any) -> TrainJobCheckpoint:
    return TrainJobCheckpoint.from_dict(
        {
            "metadata": {"name": name, "uid": f"uid-{name}"},
            "spec": {"trainJob": {"name": "gpt", "uid": "u"}, "kind": kind},
            "status": status,
        }
    )


def condition(kind: str, status: str = "True", message: str = "") -> dict[str, str]:
    return {
        "type": kind,
        "status": status,
        "reason": "Because",
        "message": message,
        "lastTransitionTime": "2026-11-30T20:00:00Z",
    }


def operation(kind: str, outcome: str = "", serial: int = 1) -> dict[str, Any]:
    return {"op": f"{kind}-{serial}", "kind": kind, "serial": serial, "spec": "{}", "outcome": outcome}


def pod(rank: int, phase: str = "Running", *, ends: bool = False, **annotations: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": f"gpt-{rank}",
        "annotations": {names.COMPLETION_INDEX: str(rank), names.PREPARED: "b", **annotations},
    }
    if ends:
        metadata["deletionTimestamp"] = "2026-11-30T20:00:00Z"
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase, "podIP": f"10.0.0.{rank}"}}


def restored_false(reason: str, generation: int) -> TrainJobCheckpoint:
    """A checkpoint whose last restore failed, when the TrainJob had this generation; it has 3."""
    failed = condition("Restored", "False", "no room") | {"reason": reason, "observedGeneration": generation}
    return checkpoint("gpt-1", conditions=[condition("Complete"), failed])


def snapshot(
    *checkpoints: TrainJobCheckpoint,
    suspend: bool = False,
    suspended: bool = False,
    gate: str = "",
    pods: tuple[dict[str, Any], ...] = (),
    done: str = "",
) -> Snapshot:
    labels = {names.POLICY_LABEL: "default"}
    return Snapshot(
        {
            "metadata": {"name": "gpt", "uid": "u", "namespace": "ns", "labels": labels, "generation": 3},
            "spec": {"suspend": suspend},
            "status": {"conditions": [{"type": done, "status": "True"}] if done else []},
        },
        {"metadata": {"labels": labels, "annotations": {names.GATE: gate}}, "spec": {"suspend": suspended}},
        pods,
        checkpoints,
    )


RUN = (pod(0), pod(1))
SAVED = checkpoint("gpt-1", operations=[operation("release", "released")], conditions=[condition("Complete")])
REFUSED = checkpoint("gpt-1", conditions=[condition("Failed", message="io_uring")])
PLACEHOLDERS = tuple(pod(n, **{names.CHECKPOINT_UID: "uid-gpt-1", names.RESTORE: "2"}) for n in (0, 1))


@pytest.mark.parametrize(
    ("seen", "phase", "detail"),
    [
        (snapshot(), Phase.STARTING, ""),
        (snapshot(pods=(pod(0), pod(1, "Pending"))), Phase.STARTING, ""),
        (snapshot(pods=RUN), Phase.RUNNING, ""),
        (snapshot(pods=(pod(0, "Succeeded"), pod(1))), Phase.RUNNING, ""),
        (snapshot(pods=RUN, suspend=True), Phase.SUSPENDING, "about to begin"),
        (snapshot(checkpoint("c", operations=[operation("release")], message="store"), pods=RUN, suspend=True),
         Phase.SUSPENDING, "store"),
        (snapshot(checkpoint("c", operations=[operation("continue")]), pods=RUN), Phase.CHECKPOINTING, ""),
        (snapshot(REFUSED, pods=RUN, suspend=True), Phase.RUNNING, "the suspend failed: io_uring"),
        (snapshot(SAVED, pods=(pod(0, ends=True),), suspend=True, suspended=True, gate="held/gpt-1"),
         Phase.SUSPENDING, "pods end"),
        (snapshot(SAVED, suspend=True, suspended=True, gate="held/gpt-1"), Phase.SUSPENDED, ""),
        (snapshot(suspend=True, suspended=True), Phase.SUSPENDED, "from the beginning"),
        (snapshot(SAVED, suspended=True, gate="held/gpt-1"), Phase.RESUMING, "preflight"),
        (snapshot(restored_false("NoRoom", 3), suspended=True, gate="held/gpt-1"),
         Phase.SUSPENDED, "could not be restored: no room"),
        (snapshot(restored_false("NoRoom", 2), suspended=True, gate="held/gpt-1"), Phase.RESUMING, "preflight"),
        (snapshot(restored_false("RankLost", 3), suspended=True, gate="held/gpt-1"), Phase.RESUMING, "preflight"),
        (snapshot(SAVED, pods=(PLACEHOLDERS[0], {**PLACEHOLDERS[1], "status": {"phase": "Pending"}})),
         Phase.RESUMING, "pods start"),
        (snapshot(SAVED, pods=PLACEHOLDERS), Phase.RESTORING, "about to begin"),
        (snapshot(checkpoint("gpt-1", operations=[operation("release", "released"), operation("restore", "", 2)]),
                  pods=PLACEHOLDERS), Phase.RESTORING, ""),
        (snapshot(checkpoint("gpt-1", conditions=[condition("Restored")],
                             operations=[operation("restore", "restored", 2)]), pods=PLACEHOLDERS), Phase.RUNNING, ""),
        (snapshot(pods=RUN, done="Complete"), Phase.COMPLETE, ""),
        (snapshot(pods=RUN, done="Failed"), Phase.FAILED, ""),
        (snapshot(pods=RUN, gate="no such state"), Phase.RUNNING, ""),
    ],
)  # fmt: skip
def test_phase(seen: Snapshot, phase: Phase, detail: str) -> None:
    found = standing(seen)
    assert found.phase is phase
    assert detail in found.detail


def test_a_suspended_job_shows_where_its_ranks_were_saved_from() -> None:
    saved = checkpoint("gpt-1", ranks=[{"rank": 0, "pod": "gpt-0", "node": "a", "memoryBytes": 5}])
    (rank,) = standing(snapshot(saved, suspend=True, suspended=True, gate="held/gpt-1")).ranks
    assert (rank.state, rank.node, rank.memory_bytes) == ("saved", "a", 5)


def test_an_unprepared_pod_is_told_with_its_reason() -> None:
    bare = pod(0, **{names.PREPARED: "", names.UNPREPARED: "hostNetwork"})
    assert standing(snapshot(pods=(bare,))).notes == ("pod gpt-0 is not prepared: hostNetwork",)


def text_of(found: Standing) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(show.standing(found))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_progress_is_shown_by_rank_and_messages_are_no_markup() -> None:
    ranks = [{"rank": 0, "memoryBytes": 4 << 20, "uploadedBytes": 1 << 20}]
    busy = checkpoint("c", operations=[operation("continue")], message="fd 7 -> [io_uring]", ranks=ranks)
    shown = text_of(standing(snapshot(busy, pods=(pod(0),))))
    assert "1.0 MiB (25%)" in shown
    assert "[io_uring]" in shown


def test_without_a_terminal_each_change_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    running, suspending = standing(snapshot(pods=RUN)), standing(snapshot(pods=RUN, suspend=True))
    with show.live(console) as told:
        for found in (running, running, suspending):
            told(found)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["Running", "Suspending: its checkpoint is about to begin"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("0.5", 0.5)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds
