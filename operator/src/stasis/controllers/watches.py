"""kopf's watches. Its handlers hand on what they are told; an error in one would be logged and dropped by kopf, so all
that can fail is done by the work queue."""

from __future__ import annotations

from typing import Any

import kopf

from stasis.api import names
from stasis.controllers import checkpoints, jobsets, nodes, policies, trainjobs
from stasis.controllers.seen import Seen
from stasis.kube.pods import CHUNK


def registry(seen: Seen) -> kopf.OperatorRegistry:
    """One handler a kind."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    def login(**given: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)

    for kind in (trainjobs, jobsets, checkpoints, policies, nodes):
        kind.watch(made, seen)
    return made


def settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    prefix = names.GROUP
    made.persistence.finalizer = f"{prefix}/kopf"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=prefix)
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=prefix)
    made.posting.loggers = False
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True  # the kinds are known, and namespaces are not looked at
    made.watching.server_timeout = 300
    made.watching.client_timeout = 330
    made.watching.chunk_size = CHUNK
    made.watching.label_selectors["jobset.x-k8s.io", "v1alpha2", "jobsets"] = names.POLICY_LABEL
    made.queueing.idle_timeout = 0.1  # each object's worker is held so long: memory at many thousands of objects
    return made
