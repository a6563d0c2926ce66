"""Programs that break checkpointing, as trainers of TrainJobs: as right as on one machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.installation import ROOT
from e2e.lab import Cluster

from stasis.cases.cluster import WORKERS, ClusterRunner
from stasis.cases.command import run_all
from stasis.cases.spec import read
from stasis.cases.verdict import Verdict

pytestmark = pytest.mark.e2e

FOLDER = ROOT.parent / "shared/cases"
# One of each way in which a pod's world is made or changed.
QUICK = frozenset("perf_bpf:perf stdout_file:plain tcp_outside:blackhole udp:new-ip volume_file_grown:grown".split())
EXPECTED = {"perf_bpf:perf": Verdict.REFUSED}


@pytest.fixture
def in_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterRunner]:
    for name in ("PATH", "KUBECONFIG"):
        monkeypatch.setenv(name, cluster.environment[name])
    with ClusterRunner(f"{cluster.registry}/stasis-trainer:e2e", FOLDER / "programs") as runner:
        yield runner


def test_a_few_cases_end_in_pods_as_they_do_on_one_machine(in_cluster: ClusterRunner) -> None:
    cases = [case for case in read(FOLDER) if str(case) in QUICK]
    assert len(cases) == len(QUICK)
    found = list(run_all(cases, in_cluster, WORKERS))
    wrong = {str(one.case): one.detail for one in found if one.verdict != EXPECTED.get(str(one.case), Verdict.RIGHT)}
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_case_is_wrong_in_pods(in_cluster: ClusterRunner) -> None:
    found = list(run_all(read(FOLDER), in_cluster, WORKERS))
    assert {str(one.case): one.detail for one in found if one.verdict is Verdict.WRONG} == {}
    assert len([one for one in found if one.verdict is Verdict.NOT_SHOWN]) < len(found) / 3
