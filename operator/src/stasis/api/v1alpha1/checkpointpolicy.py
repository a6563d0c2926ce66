"""CheckpointPolicy: how the TrainJobs that name it are checkpointed. All defaults together are the policy `default`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from stasis.api.v1alpha1.model import DnsLabel, Model, ObjectMeta, cel

_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
_UNITS = _BINARY | {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}

REPOSITORY = cel(
    r"self == '' || self.matches('^(\\[[0-9A-Fa-f:]+\\]|[A-Za-z0-9][A-Za-z0-9.-]*)(:[0-9]{1,5})?"
    r"(/[a-z0-9]+([._-]+[a-z0-9]+)*)+$')",
    "write HOST[:PORT]/NAME without a tag or digest, in lower case, such as registry.example.com/team/checkpoints",
)


class Durability(StrEnum):
    REMOTE = "Remote"  # in the registry and checked, before the pods may go
    LOCAL = "Local"  # on the nodes' disks before the pods may go; in the registry soon after. Not there yet: refused


class Addresses(StrEnum):
    AUTO = "Auto"  # by the CNI where it can, else translated
    CNI = "CNI"
    TRANSLATE = "Translate"


class OnFailure(StrEnum):
    KEEP_RUNNING = "KeepRunning"
    SUSPEND = "Suspend"  # without a checkpoint


class OnRestoreFailure(StrEnum):
    STAY_SUSPENDED = "StaySuspended"
    START_FRESH = "StartFresh"  # all ranks together, from the command's beginning


class OnDelete(StrEnum):
    RETAIN = "Retain"
    DELETE = "Delete"


class Storage(Model):
    repository: Annotated[
        str,
        Field(
            max_length=200,
            json_schema_extra=REPOSITORY,
            description="Where checkpoints go, HOST[:PORT]/NAME; /NAMESPACE/UID of the job is added. The installation's"
            " own registry where it is left out.",
        ),
    ] = ""
    secret_name: Annotated[
        str,
        Field(max_length=253, description="Secret of type kubernetes.io/dockerconfigjson in the job's namespace."),
    ] = ""


class Retention(Model):
    keep: Annotated[
        int, Field(ge=1, le=100, description="Checkpoints kept per TrainJob; the current one always is.")
    ] = 3
    ttl_seconds: Annotated[
        int | None, Field(ge=60, le=10**9, description="Age in seconds at which one that is not current is deleted.")
    ] = None
    max_bytes: Annotated[
        str | None,
        Field(
            max_length=20,
            json_schema_extra=cel(
                "self.matches('^[1-9][0-9]{0,12}(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$')",
                "write a whole number of bytes with or without a unit, such as 500Gi",
            ),
            description="Stored bytes of all checkpoints of the namespace. The oldest that are not current are deleted"
            " first; where that does not suffice, no new checkpoint is begun.",
        ),
    ] = None

    @property
    def max_bytes_int(self) -> int | None:
        return quantity(self.max_bytes) if self.max_bytes is not None else None


class CheckpointPolicySpec(Model):
    container: Annotated[
        DnsLabel,
        Field(description="The container of the pods that is checkpointed; the others start afresh at a resume."),
    ] = "node"
    storage: Storage = Storage()
    durability: Annotated[
        Durability,
        Field(
            description="When the pods may go: Remote, once the registry has all; Local, once the nodes' disks do. It"
            " is uploaded then, and can be resumed from when that is done; a node that is lost before takes it along."
        ),
    ] = Durability.REMOTE
    retention: Retention = Retention()
    addresses: Annotated[
        Addresses,
        Field(description="How the processes keep their addresses: by the CNI, by translation, or what can be had."),
    ] = Addresses.AUTO
    timeout_seconds: Annotated[
        int,
        Field(ge=10, le=86400, description="How long a suspend is held back for its checkpoint before onFailure acts."),
    ] = 900
    lost_after_seconds: Annotated[
        int,
        Field(
            ge=0,
            le=86400,
            description="For how long a node is not ready until the ranks on it count as lost, and a suspend or resume"
            " goes on without them.",
        ),
    ] = 120
    on_failure: Annotated[
        OnFailure, Field(description="What becomes of a job to be suspended that cannot be checkpointed.")
    ] = OnFailure.KEEP_RUNNING
    on_restore_failure: Annotated[
        OnRestoreFailure, Field(description="What becomes of a job to be resumed whose checkpoint cannot be restored.")
    ] = OnRestoreFailure.STAY_SUSPENDED
    on_delete: Annotated[
        OnDelete, Field(description="What becomes of the checkpoints of a TrainJob that is deleted.")
    ] = OnDelete.RETAIN
    ttl_seconds_after_delete: Annotated[
        int, Field(ge=0, le=10**9, description="With Retain: seconds from the TrainJob's deletion to theirs.")
    ] = 7 * 86400


class CheckpointPolicy(Model):
    """How TrainJobs that carry the label stasis.dev/policy with its name are checkpointed. The name `default` needs no
    object: it stands for the defaults of every field."""

    KIND: ClassVar[str] = "CheckpointPolicy"
    PLURAL: ClassVar[str] = "checkpointpolicies"
    SHORT: ClassVar[str] = "ckptpol"
    COLUMNS: ClassVar[list[dict[str, Any]]] = [
        {"name": "Container", "type": "string", "jsonPath": ".spec.container"},
        {"name": "Repository", "type": "string", "jsonPath": ".spec.storage.repository"},
        {"name": "Durability", "type": "string", "jsonPath": ".spec.durability"},
        {"name": "On failure", "type": "string", "jsonPath": ".spec.onFailure"},
        {"name": "Keep", "type": "integer", "jsonPath": ".spec.retention.keep"},
        {"name": "Max bytes", "type": "string", "jsonPath": ".spec.retention.maxBytes", "priority": 1},
        {"name": "Timeout", "type": "integer", "jsonPath": ".spec.timeoutSeconds", "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]

    metadata: ObjectMeta = ObjectMeta()
    spec: CheckpointPolicySpec = CheckpointPolicySpec()


def quantity(text: str) -> int:
    """Bytes of `500Gi`. Raises ValueError for what is no whole number with or without a unit."""
    digits = text.rstrip("".join({c for unit in _UNITS for c in unit}))
    return int(digits) * _UNITS.get(text[len(digits) :], 1)
