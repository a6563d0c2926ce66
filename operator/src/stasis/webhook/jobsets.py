"""JobSets of enabled jobs: each write goes through the gate, and a resume stamps the pods that it will make."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from stasis.api.names import GATE, POLICY_LABEL, RANKS
from stasis.core.gate import admit, parse_gate
from stasis.errors import UsageError
from stasis.kube.ranks import trainers
from stasis.webhook.review import Answer, Request


def jobsets(request: Request) -> Answer:
    """A pure function of the write."""
    jobset = copy.deepcopy(dict(request.object))
    metadata = jobset.setdefault("metadata", {})
    policy = (metadata.get("labels") or {}).get(POLICY_LABEL, "")
    if not policy or metadata.get("deletionTimestamp"):
        return Answer()
    if request.operation == "CREATE":  # never deferred: nothing runs
        _mark(jobset, {}, policy)
        return Answer(jobset)
    spec = jobset["spec"]
    was, wanted = (bool(o.get("spec", {}).get("suspend")) for o in (request.old, jobset))
    annotations = metadata.get("annotations") or {}
    try:
        gate = parse_gate(annotations.get(GATE, ""))
    except UsageError as error:
        return Answer(denied=f"annotation {GATE}: {error}")
    admitted = admit(gate, was=was, wanted=wanted)
    if admitted.suspend != wanted:
        spec["suspend"] = admitted.suspend
    if admitted.gate != gate:
        metadata["annotations"] = {**annotations, GATE: str(admitted.gate)}
    if was or admitted.suspend:  # the pod templates of a JobSet that runs cannot be changed
        _mark(jobset, admitted.stamps or {}, policy)
    notes = {"gate": str(admitted.gate) or "open", "was": was, "wanted": wanted, "suspend": admitted.suspend}
    return Answer(jobset, notes=notes | {"deferred": admitted.deferred})


def _mark(jobset: dict[str, Any], stamps: Mapping[str, str], policy: str) -> None:
    for trainer in trainers(jobset):
        metadata = trainer.template.setdefault("metadata", {})
        metadata["labels"] = {**(metadata.get("labels") or {}), POLICY_LABEL: policy}
        there = metadata.get("annotations") or {}
        wanted = {**stamps, RANKS: trainer.place()}
        changed = {name: value for name, value in wanted.items() if value != there.get(name, "")}
        if changed:
            metadata["annotations"] = {**there, **changed}
