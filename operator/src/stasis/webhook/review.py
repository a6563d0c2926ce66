"""AdmissionReview (admission.k8s.io/v1): the API server's question and our answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stasis.errors import UsageError
from stasis.webhook.patch import diff

_MAX_WARNING = 250  # characters; the API server cuts what is longer


@dataclass(frozen=True)
class Request:
    uid: str
    kind: str
    operation: str  # CREATE or UPDATE
    namespace: str
    name: str  # empty where the API server will generate it
    object: Mapping[str, Any]
    old: Mapping[str, Any]  # empty on CREATE

    @classmethod
    def of(cls, review: Any) -> Request:
        """Raises UsageError for what is no AdmissionReview of version 1."""
        try:
            request = review["request"]
            if review["apiVersion"] != "admission.k8s.io/v1":
                raise UsageError(f"an AdmissionReview of {review['apiVersion']}, not of admission.k8s.io/v1")
            return cls(
                str(request["uid"]),
                str(request["kind"]["kind"]),
                str(request["operation"]),
                str(request.get("namespace", "")),
                str(request["object"].get("metadata", {}).get("name", "")),
                request["object"],
                request.get("oldObject") or {},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"no AdmissionReview: {error!r}") from None


@dataclass(frozen=True)
class Answer:
    """`object`: as it shall be, None where it stays as it is."""

    object: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    denied: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)  # for logs

    def review(self, request: Request) -> dict[str, Any]:
        response: dict[str, Any] = {"uid": request.uid, "allowed": not self.denied}
        if self.denied:
            response["status"] = {"code": 403, "reason": "Forbidden", "message": self.denied}
        if self.warnings:
            response["warnings"] = [warning[:_MAX_WARNING] for warning in self.warnings]
        if self.object is not None and (patch := diff(request.object, self.object)):
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
