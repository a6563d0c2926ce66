"""Probes and hooks of a prepared container, said as commands of init.

kubelet's own probes fail while the trainer's tree is frozen, waited for or restored; as commands of init they hold
then, and are the original check from inside the container otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stasis.api.names import MOUNT_PATH

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")


def held(handler: Mapping[str, Any], init: str, ports: Mapping[str, int]) -> dict[str, Any] | None:
    """A probe or postStart as one that holds while the container cannot answer; None where it stays as it is."""
    command = command_of(handler, init, ports)
    if command is None or "sleep" in handler or command[:2] == [init, "probe"]:
        return None
    rest = {key: value for key, value in handler.items() if key not in _HANDLERS}
    return {**rest, "exec": {"command": [init, "probe", MOUNT_PATH, "--", *command]}}


def command_of(handler: Mapping[str, Any], init: str, ports: Mapping[str, int]) -> list[str] | None:
    """What a handler does, as a command inside the container. None for one that asks another host than the pod, or
    names a port that the container does not have."""
    if command := (handler.get("exec") or {}).get("command"):
        return list(command)
    if sleep := handler.get("sleep"):
        return [init, "sleep", str(sleep.get("seconds", 0))]
    if http := handler.get("httpGet"):
        port = _port(http, ports)
        if not port or http.get("host"):
            return None
        if http.get("scheme", "HTTP") != "HTTP":  # init knows no TLS: that the port answers must do
            return [init, "check", "tcp", port]
        headers = [f"{h['name']}: {h.get('value', '')}" for h in http.get("httpHeaders") or ()]
        return [init, "check", "http", port, http.get("path") or "/", *headers]
    if tcp := handler.get("tcpSocket"):
        port = _port(tcp, ports)
        return [init, "check", "tcp", port] if port and not tcp.get("host") else None
    if grpc := handler.get("grpc"):
        return [init, "check", "grpc", _port(grpc, ports), grpc.get("service") or ""]
    return None


def named_ports(container: Mapping[str, Any]) -> dict[str, int]:
    return {p["name"]: int(p["containerPort"]) for p in container.get("ports") or () if p.get("name")}


def _port(handler: Mapping[str, Any], ports: Mapping[str, int]) -> str:
    port = handler.get("port", "")
    return str(ports.get(port, "")) if isinstance(port, str) and not port.isdigit() else str(port)
