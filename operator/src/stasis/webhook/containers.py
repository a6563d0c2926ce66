"""One container of a pod prepared: init is its first process and runs, or waits to adopt, what it would have run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stasis.api.names import INIT_CONTAINER, MOUNT_PATH, PRESTOP_PORT, VOLUME
from stasis.errors import UsageError
from stasis.webhook.hooks import PROBES, command_of, held, named_ports
from stasis.webhook.images import Entry
from stasis.webhook.settings import InitSettings

_GRACE = 30  # seconds: Kubernetes' default
_NOBODY = 65532
_ROOM = {"cpu": "10m", "memory": "32Mi"}


def is_prepared(container: Mapping[str, Any]) -> bool:
    program = str((container.get("command") or [""])[0])
    return program.startswith(f"{MOUNT_PATH}/") and program.endswith("/init")


def prepare(
    pod: dict[str, Any], container: dict[str, Any], entry: Entry, init: InitSettings, identity: str, *, waits: bool
) -> None:
    """Changes `container` and `pod`. `entry` counts where the container has no command. `identity` names the pod
    towards its preStop; empty where it may have none of ours: its agent then waits a while after the pod began to end.
    Raises UsageError."""
    spec = pod["spec"]
    _free(spec, container)
    program = f"{MOUNT_PATH}/{init.build}/init"
    ports = named_ports(container)
    grace = spec.get("terminationGracePeriodSeconds")
    options = ["--volume", MOUNT_PATH, "--grace", str(_GRACE if grace is None else grace)]
    if identity:
        options += _pre_stop(container, identity, program, ports)
    container["command"] = [program, "wait" if waits else "run", *options, "--", *_words(container, entry)]
    lifecycle = container.get("lifecycle") or {}
    if (after := lifecycle.get("postStart")) and (held_after := held(after, program, ports)):
        container["lifecycle"] = {**lifecycle, "postStart": held_after}
    for probe in PROBES:
        if container.get(probe) and (held_probe := held(container[probe], program, ports)):
            container[probe] = held_probe
    container.setdefault("volumeMounts", []).append({"name": VOLUME, "mountPath": MOUNT_PATH})
    _seccomp(spec, container)
    spec.setdefault("volumes", []).append({"name": VOLUME, "emptyDir": {}})
    spec.setdefault("initContainers", []).append(_installer(spec, container, init))


def _pre_stop(container: dict[str, Any], identity: str, program: str, ports: Mapping[str, int]) -> list[str]:
    """Ours in the place of the user's, and options of init, which runs the user's."""
    lifecycle = container.get("lifecycle") or {}
    stop = {"host": "127.0.0.1", "port": PRESTOP_PORT, "path": f"/prestop/{identity}", "scheme": "HTTP"}
    container["lifecycle"] = {**lifecycle, "preStop": {"httpGet": stop}}
    if not (before := lifecycle.get("preStop")):
        return []
    words = command_of(before, program, ports)
    if words is None:
        raise UsageError("the container's preStop asks another host", remedy="a preStop of exec, or without host")
    return ["--pre-stop", str(len(words)), *map(_literal, words)]


def _free(spec: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    """That our names are not taken."""
    if any(volume["name"] == VOLUME for volume in spec.get("volumes") or ()):
        raise UsageError(f"the pod has a volume {VOLUME!r} of its own", remedy="another name")
    if any(other["name"] == INIT_CONTAINER for other in spec.get("initContainers") or ()):
        raise UsageError(f"the pod has an init container {INIT_CONTAINER!r} of its own", remedy="another name")
    for mount in container.get("volumeMounts") or ():
        path = str(mount["mountPath"]).rstrip("/")
        if path == MOUNT_PATH or path.startswith(f"{MOUNT_PATH}/"):
            raise UsageError(f"the container has a mount at {path} of its own", remedy="another path")


def _words(container: Mapping[str, Any], entry: Entry) -> list[str]:
    """The command without `args`, which stay where they are."""
    if command := container.get("command"):
        return list(command)
    words = entry.entrypoint if container.get("args") else entry.entrypoint + entry.cmd
    return list(map(_literal, words))


def _literal(word: str) -> str:
    """kubelet replaces $(NAME) in a container's command, not in its image's, nor in hooks."""
    return word.replace("$", "$$")


def _seccomp(spec: Mapping[str, Any], container: dict[str, Any]) -> None:
    """The runtime's own profile where the pod sets none: it denies what cannot be dumped, such as io_uring."""
    own = container.get("securityContext") or {}
    pods = spec.get("securityContext") or {}
    if not own.get("privileged") and not own.get("seccompProfile") and not pods.get("seccompProfile"):
        container["securityContext"] = {**own, "seccompProfile": {"type": "RuntimeDefault"}}


def _installer(spec: Mapping[str, Any], prepared: Mapping[str, Any], init: InitSettings) -> dict[str, Any]:
    """It needs no privilege, and fits into a namespace that enforces the restricted profile, or ranges of users."""
    users = [(part.get("securityContext") or {}).get("runAsUser") for part in (prepared, spec)]
    container: dict[str, Any] = {
        "name": INIT_CONTAINER,
        "image": init.image,
        "command": ["/init", "install", MOUNT_PATH],
        "volumeMounts": [{"name": VOLUME, "mountPath": MOUNT_PATH}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": next(filter(None, users), _NOBODY),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if init.pull_policy:
        container["imagePullPolicy"] = init.pull_policy
    others: Sequence[Mapping[str, Any]] = [*spec["containers"], *(spec.get("initContainers") or ())]
    if any((c.get("resources") or {}).get(kind) for c in others for kind in ("requests", "limits")):
        container["resources"] = {"requests": dict(_ROOM), "limits": dict(_ROOM)}  # else the pod stays BestEffort
    return container
