"""An operation as it is written down before it is begun: all that, with its records, a new leader needs to go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import CheckpointPolicySpec, Durability
from stasis.controllers.observe import container_name, container_status
from stasis.core.plan import Kind, Spec, Timing
from stasis.core.steps import Step
from stasis.kube.client import annotation, meta
from stasis.kube.lease import DURATION
from stasis.kube.ranks import rank_of

Args = dict[str, dict[str, Any]]

SHM = "/dev/shm"  # carried in any case
SHORTEST = 60.0  # seconds: a freeze's deadline outlasts a change of leader; a suspend that takes longer is withdrawn


@dataclass(frozen=True)
class Description:
    """`nodes`: rank -> name of the node whose agent answers for it."""

    spec: Spec
    nodes: Mapping[int, str]

    @property
    def args(self) -> Mapping[str, Mapping[str, Any]]:
        """Of the first step: "*" or rank (as text) -> arguments. Empty of an imported checkpoint."""
        return self.spec.args.get(Step.PLACE if self.spec.kind is Kind.RESTORE else Step.PREPARE, {})

    @property
    def pods(self) -> dict[int, str]:
        """UIDs; empty of an imported checkpoint, whose pods were another cluster's."""
        return {rank: str(self.args.get(str(rank), {}).get("pod", {}).get("uid", "")) for rank in self.spec.ranks}

    @property
    def addresses(self) -> dict[int, tuple[str, ...]]:
        """All of each rank, the one that it has now last."""
        return {int(rank): tuple(known) for rank, known in self.args["*"]["addresses"].items()}

    @property
    def local(self) -> bool:
        """Whether its gang commits before the registry has it."""
        return bool(self.args.get("*", {}).get("local"))

    def to_json(self) -> str:
        nodes = {str(rank): node for rank, node in self.nodes.items()}
        return json.dumps({"nodes": nodes, **self.spec.to_dict()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Description:
        data = json.loads(text)
        nodes = {int(rank): str(node) for rank, node in data.pop("nodes", {}).items()}
        return cls(Spec.from_dict(data), nodes)


def describe(
    checkpoint: Any,
    kind: Kind,
    serial: int,
    pods: Sequence[Any],
    *,
    world_size: int,
    repository: str,
    policy: CheckpointPolicySpec,
    known: Mapping[int, Sequence[str]],
    manifests: Mapping[int, str],
    finished: Sequence[int] = (),
) -> Description:
    """A checkpoint of these pods, or a restore in them. `known`: by which addresses processes know the ranks, oldest
    first; `manifests`: of a restore those of the checkpoint, else those to deduplicate against."""
    restore = kind is Kind.RESTORE
    uid = str(meta(checkpoint)["uid"])
    op = made_by(checkpoint) if restore else uid
    by_rank = {rank_of(pod): pod for pod in pods}
    addresses = {rank: str(pod["status"]["podIP"]) for rank, pod in by_rank.items()}
    common: dict[str, Any] = {
        "world_size": world_size,
        "repository": repository,
        "addresses": {
            str(rank): [*(old for old in known.get(rank, ()) if old != now), now] for rank, now in addresses.items()
        },
        "releases": kind is not Kind.CONTINUE,
        "uid": op,
    }
    if not restore and policy.durability is Durability.LOCAL:
        common["local"] = True
    args: Args = {"*": common}
    what = "manifest" if restore else "parent"
    for rank, pod in sorted(by_rank.items()):
        where = {"container_id": container_id(pod), "pod": _pod(pod), "volumes": emptydirs(pod)}
        args[str(rank)] = {"rank": rank, **where}
        if manifests.get(rank):
            args[str(rank)][what] = manifests[rank]
    spec = Spec(
        op=f"{uid}-r{serial}" if restore else op,
        serial=serial,
        kind=kind,
        ranks=tuple(sorted(by_rank)),
        finished=tuple(finished),
        args={Step.PLACE if restore else Step.PREPARE: args},
        timing=timing(policy),
        checkpoint=op if restore else "",
        requires=(op,) if restore and released(checkpoint) else (),
    )
    return Description(spec, {rank: str(pod["spec"]["nodeName"]) for rank, pod in by_rank.items()})


def made_by(checkpoint: Any) -> str:
    """The operation that made a checkpoint: the UID in its manifests. Of a fork or an import it is the original's."""
    return str(making(checkpoint)["op"])


def released(checkpoint: Any) -> bool:
    """Whether its ranks were to stop in it, and must have; those of one beside the training go on for a while."""
    return str(making(checkpoint)["kind"]) == str(Kind.RELEASE)


def making(checkpoint: Any) -> Any:
    """The entry of the operation that made it."""
    return next(entry for entry in checkpoint["status"]["operations"] if entry["kind"] != str(Kind.RESTORE))


def timing(policy: CheckpointPolicySpec) -> Timing:
    """A suspend is held back no longer than the policy says; a checkpoint beside the training may take its time."""
    timing = Timing()
    frozen = max(float(policy.timeout_seconds), SHORTEST)
    limits = {**timing.limits, Step.STORE: timing.storing}
    return Timing(frozen=frozen, limits=limits, lease=DURATION)


def container_id(pod: Any) -> str:
    """As the runtime names it."""
    status = container_status(pod) or {}
    return str(status.get("containerID", "")).rpartition("://")[2]


def emptydirs(pod: Any) -> list[str]:
    """Mount points of the emptyDirs that the checkpoint carries."""
    volumes = {volume["name"] for volume in pod["spec"].get("volumes") or () if volume.get("emptyDir") is not None}
    found = (c for c in pod["spec"]["containers"] if c["name"] == container_name(pod))
    container: dict[str, Any] = next(found, {})
    return [
        str(mount["mountPath"])
        for mount in container.get("volumeMounts") or ()
        if mount["name"] in volumes and mount["name"] != names.VOLUME and mount["mountPath"] != SHM
    ]


def _pod(pod: Any) -> dict[str, str]:
    about = meta(pod)
    return {
        "namespace": str(about["namespace"]),
        "name": str(about["name"]),
        "uid": str(about["uid"]),
        "id": annotation(pod, names.ID),
    }
