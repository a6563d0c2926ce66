"""What the types of the API share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

Timestamp = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$", max_length=71)]
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
Uid = Annotated[str, Field(min_length=1, max_length=64)]
Int64 = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
Decimal = Annotated[str, Field(pattern=r"^[0-9]{1,12}(\.[0-9]{1,9})?$", max_length=22)]  # the API has no floats


def cel(rule: str, message: str) -> dict[str, Any]:
    """For `json_schema_extra`: a rule that the API server checks, and what it says when the rule does not hold."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message}]}


def list_map(*keys: str) -> dict[str, Any]:
    """For `json_schema_extra` of a list whose items are told apart by `keys`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


class Model(BaseModel):
    """camelCase in the API, snake_case here; what a later version added is passed over."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")

    def to_dict(self) -> dict[str, Any]:
        """JSON as the API has it, without what is not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Raises pydantic.ValidationError; from the API server, which validates by the same schema, it does not."""
        return cls.model_validate(dict(data))


class Condition(Model):
    """metav1.Condition."""

    type: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=128)]
    message: Annotated[str, Field(max_length=32768)] = ""
    last_transition_time: Timestamp
    observed_generation: Int64 | None = None


Conditions = Annotated[list[Condition], Field(max_length=16, json_schema_extra=list_map("type"))]


class ObjectMeta(Model):
    """What is read of an object's metadata; the rest of it is kept by whoever holds the object itself."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []
