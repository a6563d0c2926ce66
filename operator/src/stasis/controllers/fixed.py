"""What a dump fixes of its container. A restore into a container that differs in it is refused (rule 21): the process
would go on with a command, files and a user that are not those that its pod shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stasis.api import names
from stasis.controllers.observe import container_name, container_status
from stasis.kube.client import label
from stasis.kube.ranks import rank_of

TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"  # mounted by the API server, from a volume of a random name
SHOWN = 200  # characters of a value


def fixed_of(pods: Iterable[Any]) -> dict[str, str]:
    """Of all trainers of a gang, as JOB/NAME: the pods of one are alike."""
    return {f"{_job(pod)}/{name}": value for pod in _one_of_each(pods) for name, value in fixed(pod).items()}


def fixed(pod: Any) -> dict[str, str]:
    """By name, as text: of the checkpointed container, as its user has written it. Values of variables are hashed."""
    container = next(dict(c) for c in pod["spec"]["containers"] if c["name"] == container_name(pod))
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if "--" in words:
        words = words[words.index("--") + 1 :]  # before it: init, and what it is told
    return {
        "command": json.dumps(words),
        "workingDir": str(container.get("workingDir", "")),
        "env": json.dumps(dict(_variables(container)), sort_keys=True),
        "mounts": json.dumps(dict(_mounts(pod, container)), sort_keys=True),
        "user": json.dumps(_user(pod, container), sort_keys=True),
    }


def image(pod: Any) -> str:
    """NAME and digest of the image that the container runs, as kubelet says; the digest is after the last space."""
    status = container_status(pod) or {}
    digest = str(status.get("imageID", "")).rpartition("://")[2]
    return f"{status.get('image', '')} {digest}" if digest else ""


def changed(saved: Mapping[str, Any], pods: Sequence[Any], *, copy: bool) -> str:
    """Why none of these pods can take over a checkpoint with this status: both values; empty where they can. A copy
    is in another job, whose variables name it. What was not recorded is not compared."""
    images = {rank["rank"]: str(rank.get("image", "")) for rank in saved.get("ranks") or ()}
    found = []
    for pod in pods:
        was, now = images.get(rank_of(pod), ""), image(pod)
        if _differ(was, now):
            found.append(f"the image was {was}, is {now}")
        before: Mapping[str, str] = saved.get("fixed") or {}
        for name, value in fixed(pod).items():
            known = before.get(f"{_job(pod)}/{name}", value)
            if known != value and not (copy and name == "env"):
                found.append(_told(name, known, value))
    return "; ".join(dict.fromkeys(found))


def _job(pod: Any) -> str:
    return label(pod, names.REPLICATED_JOB_LABEL)


def _one_of_each(pods: Iterable[Any]) -> Iterable[Any]:
    return {_job(pod): pod for pod in pods}.values()


def _differ(was: str, now: str) -> bool:
    """Whether these are two images. The digest of a manifest says nothing about that of an image's config."""
    one, other = (text.rpartition(" ")[2] for text in (was, now))
    manifests = [("@" in text, text.rpartition("@")[2]) for text in (one, other)]
    return bool(one and other) and manifests[0][0] == manifests[1][0] and manifests[0] != manifests[1]


def _told(name: str, was: str, now: str) -> str:
    if name != "env":
        return f"{name} was {was[:SHOWN]}, is {now[:SHOWN]}"
    one, other = json.loads(was), json.loads(now)
    differ = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
    return f"other values of env {', '.join(differ)}"


def _variables(container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for source in container.get("envFrom") or ():
        yield json.dumps(source, sort_keys=True), ""
    for variable in container.get("env") or ():
        content = json.dumps({k: v for k, v in variable.items() if k != "name"}, sort_keys=True)
        yield str(variable["name"]), hashlib.sha256(content.encode()).hexdigest()[:12]


def _mounts(pod: Any, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where, and of what kind: which claim is behind it is the user's to choose."""
    kinds = {v["name"]: next((key for key in v if key != "name"), "") for v in pod["spec"].get("volumes") or ()}
    for mount in container.get("volumeMounts") or ():
        if mount["name"] != names.VOLUME and mount["mountPath"] != TOKENS:
            yield str(mount["mountPath"]), kinds.get(mount["name"], "")


def _user(pod: Any, container: Mapping[str, Any]) -> dict[str, Any]:
    both = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
    return {key: both[key] for key in ("runAsUser", "runAsGroup") if key in both}
