"""Pods of enabled jobs: the container to be checkpointed gets init as its first process; what cannot be prepared runs
as if Stasis were not there, and says so."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from stasis.api import names
from stasis.api.v1alpha1.checkpointpolicy import Addresses
from stasis.core.gate import Stamp
from stasis.errors import StasisError, UsageError
from stasis.kube.ranks import rank_of
from stasis.webhook.cluster import Cluster
from stasis.webhook.containers import is_prepared, prepare
from stasis.webhook.images import Entry, Images
from stasis.webhook.review import Answer, Request
from stasis.webhook.settings import Settings

_SANDBOXES = re.compile(r"gvisor|runsc|kata", re.IGNORECASE)


class Pods:
    def __init__(self, cluster: Cluster, images: Images, settings: Settings) -> None:
        self._cluster, self._images, self._settings = cluster, images, settings

    async def __call__(self, request: Request) -> Answer:
        """A placeholder that cannot be prepared is refused, and so tried again by its Job: it would train from the
        beginning while the others wait for their restore."""
        pod = copy.deepcopy(dict(request.object))
        metadata = pod.setdefault("metadata", {})
        if not (metadata.get("labels") or {}).get(names.POLICY_LABEL):
            return Answer()
        if any(is_prepared(container) for container in pod["spec"]["containers"]):
            return Answer()
        annotations = metadata.get("annotations") or {}
        stamped = bool(annotations.get(names.CHECKPOINT))
        try:
            added = await self._prepare(pod, request.namespace, Stamp.of(annotations))
        except UsageError as reason:
            if stamped:
                return Answer(denied=f"cannot be prepared for its restore: {reason}")
            pod = copy.deepcopy(dict(request.object))
            warning = f"cannot be checkpointed: {reason}"
            return self._answer(pod, {names.UNPREPARED: str(reason)}, (warning,))
        return self._answer(pod, added)

    @staticmethod
    def _answer(pod: dict[str, Any], annotations: Mapping[str, str], warnings: tuple[str, ...] = ()) -> Answer:
        metadata = pod["metadata"]
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **annotations}
        return Answer(pod, warnings, notes=annotations)

    async def _prepare(self, pod: dict[str, Any], namespace: str, stamp: Stamp | None) -> dict[str, str]:
        """Changes the pod; annotations to be added. Raises UsageError with the reason why it cannot be prepared."""
        refuse(pod["spec"])
        policy = pod["metadata"]["labels"][names.POLICY_LABEL]
        spec = await self._cluster.policy(namespace, policy)
        if spec is None:
            raise UsageError(f"there is no CheckpointPolicy {policy!r} in namespace {namespace}")
        name = stamp.container if stamp and stamp.container else spec.container
        container = next((c for c in pod["spec"]["containers"] if c["name"] == name), None)
        if container is None:
            there = ", ".join(c["name"] for c in pod["spec"]["containers"])
            raise UsageError(f"the pod has no container {name!r}, it has {there}", remedy="set container in the policy")
        entry = Entry() if container.get("command") else await self._entry(pod, container, namespace)
        hook = self._settings.pre_stop and not await self._cluster.forbids_hooks_to_the_host(namespace)
        identity = secrets.token_hex(16) if hook else ""
        prepare(pod, container, entry, self._settings.init, identity, waits=stamp is not None)
        found = {names.PREPARED: self._settings.init.build, names.CONTAINER: name}
        found |= {names.ID: identity} if identity else {}
        return found if spec.addresses is Addresses.TRANSLATE else found | self._address(pod, stamp)

    async def _entry(self, pod: Mapping[str, Any], container: Mapping[str, Any], namespace: str) -> Entry:
        if not self._settings.read_pull_secrets:
            configs = []
        else:
            listed = pod["spec"].get("imagePullSecrets") or []
            configs = [await self._cluster.docker_config(namespace, s["name"]) for s in listed if s.get("name")]
        arch = (pod["spec"].get("nodeSelector") or {}).get("kubernetes.io/arch", "")
        try:
            entry = await self._images.entry(container["image"], configs, arch)
        except StasisError as error:  # its class only: what a registry says is not for everyone who may make a pod
            raise UsageError(
                f"container {container['name']} has no command, and that of image {container['image']} cannot be read"
                f" from its registry ({type(error).__name__})",
                remedy="write the command into the TrainJob or its runtime",
            ) from None
        if not entry.entrypoint and not entry.cmd and not container.get("args"):
            raise UsageError(f"neither container {container['name']} nor its image has a command")
        return entry

    def _address(self, pod: Mapping[str, Any], stamp: Stamp | None) -> dict[str, str]:
        """For the IPAM step, which holds the addresses of pods that have the annotation, also where it is empty."""
        wanted = stamp.addresses.get(rank_of(pod), "") if stamp else ""
        calico = self._settings.calico and wanted
        return {names.POD_IP: wanted} | ({names.CALICO_ADDRESSES: json.dumps(wanted.split(","))} if calico else {})


def refuse(spec: Mapping[str, Any]) -> None:
    """Raises UsageError for what no container of a pod can be checkpointed in."""
    for field in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(field):
            raise UsageError(f"the pod has {field}", remedy=f"leave {field} out")
    if spec.get("hostUsers") is False:
        raise UsageError("the pod has hostUsers: false", remedy="leave hostUsers out")
    runtime = spec.get("runtimeClassName") or ""
    if _SANDBOXES.search(runtime):
        raise UsageError(f"the pod runs in a sandbox ({runtime})", remedy="a runtime class of runc or crun")
    system = (spec.get("os") or {}).get("name") or (spec.get("nodeSelector") or {}).get("kubernetes.io/os")
    if system == "windows":
        raise UsageError("the pod is for Windows")
