"""TrainJobCheckpoint: one checkpoint of a whole gang, with the durable state of the operations that made and restored
it: what a new leader needs to go on, wherever the last one stopped."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from stasis.api.names import GROUP, TRAINJOB_LABEL, TRAINJOB_UID_LABEL
from stasis.api.v1alpha1.checkpointpolicy import REPOSITORY
from stasis.api.v1alpha1.model import (
    Conditions,
    Decimal,
    Digest,
    Int64,
    Model,
    ObjectMeta,
    Timestamp,
    Uid,
    cel,
    list_map,
)

HOLD_FINALIZER = f"{GROUP}/hold"  # while something depends on the checkpoint's bytes


class CheckpointKind(StrEnum):
    SUSPEND = "Suspend"  # the ranks are released
    CHECKPOINT = "Checkpoint"  # the ranks go on


class ConditionType(StrEnum):
    COMPLETE = "Complete"  # committed: it can be restored from where its bytes are
    DURABLE = "Durable"  # the registry has all of it
    RELEASED = "Released"  # the ranks that it was taken of are gone
    RESTORED = "Restored"  # the last restore of it succeeded
    CURRENT = "Current"  # by the user's choice the job is resumed from it (or, False, from another one)
    FAILED = "Failed"  # there never will be a checkpoint
    LOST = "Lost"  # its bytes are gone
    EXPIRED = "Expired"  # its bytes are being deleted


class TrainJobRef(Model):
    name: Annotated[str, Field(min_length=1, max_length=63)]
    uid: Annotated[Uid, Field(description="A job made anew under the same name has another UID, and no checkpoint.")]


class TrainJobCheckpointSpec(Model):
    model_config = ConfigDict(
        json_schema_extra=cel("self == oldSelf", "the spec cannot be changed: make another TrainJobCheckpoint")
    )

    train_job: TrainJobRef
    kind: Annotated[
        CheckpointKind, Field(description="Suspend: the pods are released; Checkpoint: training goes on.")
    ] = CheckpointKind.CHECKPOINT
    requested_by: Annotated[str, Field(max_length=253, description="Who or what asked for it.")] = ""
    policy: Annotated[str, Field(max_length=63, description="The job's policy where it is left out.")] = ""
    repository: Annotated[
        str,
        Field(
            max_length=400,
            json_schema_extra=REPOSITORY,
            description="The policy's or the installation's; any other is refused.",
        ),
    ] = ""
    container: Annotated[str, Field(max_length=63, description="The policy's where it is left out.")] = ""


class OperationRecord(Model):
    """One decision of an operation: written once, by compare-and-swap; the first writer wins."""

    model_config = ConfigDict(json_schema_extra=cel("self == oldSelf", "a record is written once"))

    key: Annotated[str, Field(min_length=1, max_length=200)]
    verdict: Annotated[str, Field(max_length=32)]
    epoch: Int64
    record: Annotated[str, Field(max_length=262144, description="JSON of the whole record.")]


class Operation(Model):
    """A checkpoint or a restore, as the gang protocol carries it out."""

    op: Annotated[str, Field(min_length=1, max_length=100)]
    kind: Annotated[str, Field(json_schema_extra={"enum": ["release", "continue", "restore"]})]
    serial: Int64
    spec: Annotated[str, Field(max_length=1048576, description="JSON: ranks, arguments and timing of the operation.")]
    records: Annotated[list[OperationRecord], Field(max_length=32, json_schema_extra=list_map("key"))] = []
    outcome: Annotated[str, Field(max_length=32)] = ""
    start_time: Timestamp | None = None
    end_time: Timestamp | None = None


class RankStatus(Model):
    rank: Annotated[int, Field(ge=0, json_schema_extra={"format": "int32"})]
    pod: Annotated[str, Field(max_length=253)] = ""
    node: Annotated[str, Field(max_length=253)] = ""
    container: Annotated[str, Field(max_length=63)] = ""
    image: Annotated[str, Field(max_length=1024, description="The container's: its name, and its digest.")] = ""
    manifest: Annotated[Digest | None, Field(description="Of the rank's part of the checkpoint.")] = None
    addresses: Annotated[
        list[Annotated[str, Field(max_length=64)]],
        Field(max_length=16, description="By which the processes know it; the first is its first pod's."),
    ] = []
    pod_ip: Annotated[
        str,
        Field(alias="podIP", max_length=64, description="Of the pod that it runs in, where that is another address."),
    ] = ""
    memory_bytes: Int64 | None = None
    stored_bytes: Int64 | None = None
    uploaded_bytes: Int64 | None = None
    seconds: Annotated[dict[str, Decimal], Field(max_length=32, description="By step: how long it took.")] = {}
    fingerprint: Annotated[
        str, Field(max_length=16384, description="JSON: kernel, CPU features, init, image that a restore must match.")
    ] = ""


class TrainJobCheckpointStatus(Model):
    conditions: Conditions = []
    observed_generation: Int64 | None = None
    serial: Annotated[
        Int64 | None,
        Field(json_schema_extra=cel("self == oldSelf", "the serial is set once"), description="Grows by job."),
    ] = None
    policy: Annotated[str, Field(max_length=63)] = ""
    repository: Annotated[str, Field(max_length=400, description="Where it is.")] = ""
    container: Annotated[str, Field(max_length=63)] = ""
    index: Annotated[Digest | None, Field(description="Of the image index that names all ranks.")] = None
    tag: Annotated[str, Field(max_length=128)] = ""
    fixed: Annotated[
        dict[str, Annotated[str, Field(max_length=32768)]],
        Field(
            max_length=64,
            description="What a restore's containers must agree in, by trainer; values of variables are hashed.",
        ),
    ] = {}
    world_size: Annotated[int | None, Field(ge=1, json_schema_extra={"format": "int32"})] = None
    ranks: Annotated[list[RankStatus], Field(max_length=4096, json_schema_extra=list_map("rank"))] = []
    operations: Annotated[
        list[Operation],
        Field(
            max_length=8,
            json_schema_extra=list_map("op"),
            description="The checkpoint's own, then restores: what runs, and the last that ended.",
        ),
    ] = []
    restores: Annotated[Int64 | None, Field(description="How many restores of it were begun.")] = None
    frozen_seconds: Annotated[Decimal | None, Field(description="The longest that a rank stood still.")] = None
    memory_bytes: Annotated[Int64 | None, Field(description="Of the processes of all ranks.")] = None
    stored_bytes: Annotated[Int64 | None, Field(description="Of all ranks in the registry.")] = None
    size: Annotated[str, Field(max_length=32, description="storedBytes for people.")] = ""
    address_means: Annotated[
        str,
        Field(
            json_schema_extra={"enum": ["", "CNI", "Translate"]},
            description="How the last restore gave the processes their addresses.",
        ),
    ] = ""
    start_time: Timestamp | None = None
    completion_time: Timestamp | None = None
    message: Annotated[str, Field(max_length=32768, description="What it does, or why it failed.")] = ""


def _condition(kind: ConditionType, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


class TrainJobCheckpoint(Model):
    """One checkpoint of all ranks of a TrainJob. Those of a suspended job are made and deleted by Stasis; one of kind
    Checkpoint can be made by anyone, to save a job that goes on."""

    KIND: ClassVar[str] = "TrainJobCheckpoint"
    PLURAL: ClassVar[str] = "trainjobcheckpoints"
    SHORT: ClassVar[str] = "ckpt"
    COLUMNS: ClassVar[list[dict[str, Any]]] = [
        {"name": "Job", "type": "string", "jsonPath": ".spec.trainJob.name"},
        {"name": "Kind", "type": "string", "jsonPath": ".spec.kind"},
        {"name": "Complete", "type": "string", "jsonPath": _condition(ConditionType.COMPLETE)},
        {"name": "Durable", "type": "string", "jsonPath": _condition(ConditionType.DURABLE)},
        {"name": "Released", "type": "string", "jsonPath": _condition(ConditionType.RELEASED)},
        {"name": "Restored", "type": "string", "jsonPath": _condition(ConditionType.RESTORED)},
        {"name": "Size", "type": "string", "jsonPath": ".status.size"},
        {"name": "Frozen", "type": "string", "jsonPath": ".status.frozenSeconds"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Message", "type": "string", "jsonPath": ".status.message", "priority": 1},
        {"name": "Repository", "type": "string", "jsonPath": ".status.repository", "priority": 1},
    ]

    metadata: ObjectMeta = ObjectMeta()
    spec: TrainJobCheckpointSpec
    status: TrainJobCheckpointStatus | None = None

    @staticmethod
    def labels_for(name: str, uid: str) -> dict[str, str]:
        """By which the checkpoints of a TrainJob are found."""
        return {TRAINJOB_LABEL: name, TRAINJOB_UID_LABEL: uid}

    def condition(self, kind: ConditionType) -> bool:
        """Whether the condition is True."""
        conditions = self.status.conditions if self.status else []
        return any(c.type == kind and c.status == "True" for c in conditions)
