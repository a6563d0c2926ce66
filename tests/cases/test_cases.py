"""Programs that break checkpointing survive, or are refused in time: through the product's own path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stasis.cases import EXIT_WRONG, run
from stasis.cases.runner import Result
from stasis.cases.spec import Case, read
from stasis.cases.verdict import Verdict

pytestmark = [pytest.mark.root, pytest.mark.criu]

OWN = Path(__file__).parent
SHARED = OWN.parents[2] / "shared" / "cases"
# One or two of each kind; all of them are part of `make test-all`.
QUICK = frozenset(
    "append_log:layer big_shm:smaller-shm cgroup_nested:plain children_states:plain cow_workers:plain dirs:deleted-cwd "
    "dl_fork:plain elastic_agent:seccomp-hostname-changed file_locks:plain ghost_big:emptydir hostname:changed-ip "
    "io_uring:plain loopback_server:pod-addr-new-ip memfd:plain mlock:plain mp_semaphores:plain "
    "netlink_packet:netlink-unread perf_bpf:perf pidfd:plain pipes_fifo:plain pipes_fifo:packet-pipe proc_fds:proc "
    "ptraced:plain seccomp:both-uid-1000 stdout_file:plain sysv_shm:sem-only tcp_outside:blackhole threads_300:plain "
    "udp:new-ip unix_sockets:plain volume_file_grown:grown watchdog:monotonic".split()
)
# What this kind of machine cannot show.
NOT_SHOWN = frozenset({"elastic_agent:uv-no-io-uring", "watchdog:realtime"})
# Own programs: some are made to go wrong.
EXPECTED = {
    "survives:plain": Verdict.RIGHT,
    "survives:lies": Verdict.WRONG,
    "survives:skips": Verdict.WRONG,
    "survives:dies": Verdict.WRONG,
    "survives:hangs": Verdict.WRONG,
    "refused:plain": Verdict.REFUSED,
    "refused:then-broken": Verdict.WRONG,
    "scheduling:plain": Verdict.RIGHT,
    "scheduling:pinned": Verdict.RIGHT,
    "huge_pages:plain": Verdict.RIGHT,
    "cgroup_deep:plain": Verdict.RIGHT,
    "split_lines:plain": Verdict.RIGHT,
}


def shared() -> list[Case]:
    return read(SHARED) if SHARED.is_dir() else []


def marked(case: Case) -> object:
    return pytest.param(case, id=str(case), marks=[] if str(case) in QUICK else [pytest.mark.slow])


def test_the_folder_of_cases_is_there() -> None:
    assert SHARED.is_dir(), f"{SHARED} is missing: the cases cannot be shown"
    assert {str(case) for case in shared()} >= QUICK | NOT_SHOWN


@pytest.mark.parametrize("case", [marked(case) for case in shared()])
def test_case(case: Case, result: Callable[[Case], Result]) -> None:
    found = result(case)
    assert found.verdict is not Verdict.WRONG, found.detail
    assert (found.verdict is Verdict.NOT_SHOWN) == (str(case) in NOT_SHOWN), found.detail


@pytest.mark.parametrize("case", read(OWN), ids=str)
def test_own_case(case: Case, result: Callable[[Case], Result]) -> None:
    found = result(case)
    assert found.verdict is EXPECTED[str(case)], found.detail


def test_a_wrong_case_shows_in_the_exit_code(shim: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OWN, "survives:lies", "json") == EXIT_WRONG
    (found,) = json.loads(capsys.readouterr().out)["cases"]
    assert found["verdict"] == "wrong"
    assert "CORRUPT" in found["detail"]
