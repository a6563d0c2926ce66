"""What is installed of Stasis in a cluster, and whether it is well: for `doctor` and `version`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightkube.core import resource
from lightkube.generic_resource import GenericNamespacedResource
from lightkube.resources.admissionregistration_v1 import MutatingWebhookConfiguration
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Node, Pod

import stasis
from stasis.api.names import GROUP, VERSION
from stasis.api.v1alpha1 import CheckpointPolicy, TrainJobCheckpoint
from stasis.errors import NotFound, StasisError
from stasis.kube.client import meta, ready
from stasis.plugin.cluster import INSTALL, Cluster, asked
from stasis.plugin.names import COMPONENT, INSTALLED

NAMESPACE = "stasis-system"  # where nothing says otherwise
ALL: Any = "*"


class AgentStatus(GenericNamespacedResource):
    """What an agent says of its node, through the API server: `NAME:PORT` of its pod."""

    _api_info = resource.ApiInfo(
        resource=resource.ResourceDef("", "v1", "Pod"),
        parent=resource.ResourceDef("", "v1", "Pod"),
        plural="pods",
        verbs=["get"],
        action="proxy/v1/status",
    )


@dataclass(frozen=True)
class Found:
    """One thing that was looked at. `status`: ok, warn, lack, as of `stasis doctor`."""

    area: str
    name: str
    status: str
    found: str
    remedy: str = ""


def find_namespace(cluster: Cluster) -> str:
    """Of the installation."""
    try:
        found = _parts(cluster, "controller")
    except StasisError:
        return NAMESPACE
    return str(meta(found[0])["namespace"]) if found else NAMESPACE


def versions(cluster: Cluster) -> dict[str, Any]:
    """Of this program, and of the parts that are installed, by their images."""
    installed = {}
    for part in ("controller", "webhook"):
        for deployment in _parts(cluster, part):
            installed[part] = _image(deployment["spec"]["template"]["spec"])
    for pod in _agents(cluster):
        installed["agent"] = _image(pod["spec"])
    return {"plugin": stasis.__version__, "installed": installed}


def examine(cluster: Cluster) -> list[Found]:
    """In the order in which it is shown. What may not be looked at is a warning."""
    looks = (_definitions, _deployments, _webhook, _nodes)
    found: list[Found] = []
    for look in looks:
        try:
            found += look(cluster)
        except StasisError as error:
            found.append(Found("cluster", look.__name__.strip("_"), "warn", error.message, error.remedy))
    return found


def _definitions(cluster: Cluster) -> Iterator[Found]:
    """Ours, and those that we cannot do without."""
    kinds = [f"{kind.PLURAL}.{GROUP}" for kind in (CheckpointPolicy, TrainJobCheckpoint)]
    for name, remedy in (
        *((name, INSTALL) for name in kinds),
        ("trainjobs.trainer.kubeflow.org", "install Kubeflow Trainer"),
        ("jobsets.jobset.x-k8s.io", "install JobSet: it comes with Kubeflow Trainer"),
    ):
        try:
            with asked(f"CustomResourceDefinition {name}"):
                definition = cluster.client.get(CustomResourceDefinition, name).to_dict()
        except NotFound:
            yield Found("API", name, "lack", "not installed", remedy)
            continue
        served = [version["name"] for version in definition["spec"]["versions"] if version.get("served")]
        if name in kinds and VERSION not in served:
            yield Found("API", name, "lack", f"serves {', '.join(served)}, not {VERSION}", "upgrade the chart")
        else:
            yield Found("API", name, "ok", ", ".join(served))


def _deployments(cluster: Cluster) -> Iterator[Found]:
    for part in ("controller", "webhook", "registry"):
        deployments = _parts(cluster, part)
        if not deployments and part != "registry":  # which may be one of the user's own
            yield Found("parts", part, "lack", "not installed", INSTALL)
        for deployment in deployments:
            where = f"kubectl -n {meta(deployment)['namespace']} describe deploy/{meta(deployment)['name']}"
            wanted = int(deployment["spec"].get("replicas", 1))
            ready = int((deployment.get("status") or {}).get("readyReplicas") or 0)
            status = "ok" if ready >= wanted else "warn" if ready else "lack"
            image = _image(deployment["spec"]["template"]["spec"])
            yield Found("parts", part, status, f"{ready} of {wanted} ready, {image}", "" if status == "ok" else where)


def _webhook(cluster: Cluster) -> Iterator[Found]:
    try:
        with asked("MutatingWebhookConfiguration stasis"):
            found = cluster.client.get(MutatingWebhookConfiguration, "stasis").to_dict()
    except NotFound:
        yield Found("parts", "admission", "lack", "no MutatingWebhookConfiguration: jobs are not prepared", INSTALL)
        return
    hooks = found.get("webhooks") or ()
    bare = [hook["name"] for hook in hooks if not (hook.get("clientConfig") or {}).get("caBundle")]
    if bare:
        remedy = "the controller's leader writes it: look at its log"
        yield Found("parts", "admission", "lack", f"no certificate authority in {', '.join(bare)}", remedy)
    else:
        yield Found("parts", "admission", "ok", f"{len(hooks)} webhooks")


def _nodes(cluster: Cluster) -> Iterator[Found]:
    """Each node with its agent, and what that says of it."""
    with asked("nodes"):
        nodes = [node.to_dict() for node in cluster.client.list(Node)]
    agents = {(pod.get("spec") or {}).get("nodeName"): pod for pod in _agents(cluster)}
    for node in nodes:
        name = meta(node)["name"]
        info = (node.get("status") or {}).get("nodeInfo") or {}
        system = f"kernel {info.get('kernelVersion', '?')}, {info.get('containerRuntimeVersion', '?')}"
        pod = agents.get(name)
        if pod is None:
            remedy = "jobs on it cannot be checkpointed; see agent.nodeSelector, agent.tolerations of the chart"
            yield Found("nodes", name, "warn", f"no agent, {system}", remedy)
        elif not ready(pod):
            remedy = f"kubectl -n {meta(pod)['namespace']} describe pod {meta(pod)['name']}"
            yield Found("nodes", name, "lack", f"its agent is not ready, {system}", remedy)
        else:
            yield from _agent(cluster, name, pod, system)


def _agent(cluster: Cluster, node: str, pod: Any, system: str) -> Iterator[Found]:
    try:
        with asked(f"agent on {node}"):
            status = cluster.client.get(
                AgentStatus, f"{meta(pod)['name']}:{_metrics_port(pod)}", namespace=meta(pod)["namespace"]
            )
    except StasisError as error:
        yield Found("nodes", node, "warn", f"its agent is ready, {system}; it was not asked: {error.message}")
        return
    ranks = len(status.get("ranks") or ())
    words = f"agent {status.get('version')}, CRIU {status.get('criu')}, {system}, {ranks} ranks at work"
    other = status.get("version") != stasis.__version__
    yield Found("nodes", node, "warn" if other else "ok", words, f"this is {stasis.__version__}" if other else "")
    for check in status.get("checks") or ():
        if check["status"] != "ok":
            what = f"{check['name']}: {check['found']}. {check['meaning']}"
            yield Found("nodes", node, check["status"], what, check.get("remedy", ""))


def _metrics_port(pod: Any) -> int:
    ports = [port for c in pod["spec"]["containers"] for port in c.get("ports") or ()]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == "metrics"), 9480)


def _parts(cluster: Cluster, part: str) -> list[dict[str, Any]]:
    return _listed(cluster, Deployment, part)


def _agents(cluster: Cluster) -> list[dict[str, Any]]:
    return _listed(cluster, Pod, "agent")


def _listed(cluster: Cluster, kind: Any, part: str) -> list[dict[str, Any]]:
    with asked(f"{part} of Stasis"):
        found: Iterable[Any] = cluster.client.list(kind, namespace=ALL, labels={**INSTALLED, COMPONENT: part})
        return [item.to_dict() for item in found]


def _image(pod_spec: Any) -> str:
    return str(pod_spec["containers"][0]["image"])
