"""JobSets at admission: whatever the state, what was admitted once is admitted again as it is."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import jsonpatch
import pytest

from stasis.api import names
from stasis.core.gate import Gate, Held, Open, Resume, Stamp, Suspend
from stasis.webhook.jobsets import jobsets
from stasis.webhook.patch import diff
from stasis.webhook.review import Request

GATES: tuple[Gate, ...] = (Open(), Suspend(), Suspend("c"), Held("c"), Resume(), Resume(Stamp("c", "u", 3)))
CASES = list(itertools.product(GATES, (False, True), (False, True), (False, True)))


def jobset(suspend: bool, gate: Gate, *, stamped: bool = False) -> dict[str, Any]:
    template: dict[str, Any] = {"metadata": {"labels": {"app": "x"}}, "spec": {}}
    if stamped:
        template["metadata"]["annotations"] = Stamp("old", "u0", 2).annotations() | {"mine": "1"}
    return {
        "metadata": {"labels": {names.POLICY_LABEL: "p"}, "annotations": {names.GATE: str(gate)} if str(gate) else {}},
        "spec": {
            "suspend": suspend,
            "replicatedJobs": [{"name": "node", "template": {"spec": {"template": template}}}],
        },
    }


def admitted(old: dict[str, Any], new: dict[str, Any], operation: str = "UPDATE") -> dict[str, Any]:
    before = copy.deepcopy((old, new))
    answer = jobsets(Request("1", "JobSet", operation, "ns", "j", new, old))
    assert (old, new) == before, "admission changes nothing that it was given"
    made: dict[str, Any] = jsonpatch.apply_patch(new, diff(new, answer.object)) if answer.object else new
    return made


def template(of: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = of["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]
    return found


@pytest.mark.parametrize(("gate", "was", "wanted", "stamped"), CASES, ids=str)
def test_admitted_once_is_admitted_again_as_it_is(gate: Gate, was: bool, wanted: bool, stamped: bool) -> None:
    old = jobset(was, Open(), stamped=stamped)
    once = admitted(old, jobset(wanted, gate, stamped=stamped))
    assert admitted(old, once) == once


@pytest.mark.parametrize(("gate", "was", "wanted", "stamped"), CASES, ids=str)
def test_the_templates_of_a_jobset_that_runs_are_not_touched(
    gate: Gate, was: bool, wanted: bool, stamped: bool
) -> None:
    new = jobset(wanted, gate, stamped=stamped)
    made = admitted(jobset(was, Open(), stamped=stamped), new)
    if not was and not made["spec"]["suspend"]:
        assert template(made) == template(new)


def test_a_fresh_start_blanks_an_old_stamp_and_keeps_what_is_the_users() -> None:
    made = admitted(jobset(True, Open(), stamped=True), jobset(False, Resume(), stamped=True))
    annotations = template(made)["annotations"]
    assert Stamp.of(annotations) is None
    assert names.CHECKPOINT in annotations, "JobSet would keep in its Jobs what is only removed here"
    assert annotations["mine"] == "1"


def test_a_new_jobset_gets_no_stamp_and_is_not_deferred() -> None:
    new = jobset(True, Open())
    made = admitted({}, new, "CREATE")
    assert made["spec"]["suspend"] is True
    assert template(made) == {"labels": {"app": "x", names.POLICY_LABEL: "p"}}


def test_every_template_is_a_ranks_where_no_job_says_what_step_it_is() -> None:
    new = jobset(False, Open())
    new["spec"]["replicatedJobs"].append(copy.deepcopy(new["spec"]["replicatedJobs"][0]) | {"name": "other"})
    made = admitted({}, new, "CREATE")
    for job in made["spec"]["replicatedJobs"]:
        assert names.POLICY_LABEL in job["template"]["spec"]["template"]["metadata"]["labels"]
