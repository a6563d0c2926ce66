"""A case as the trainer of a TrainJob: the objects that make its world, and what no pod can be given."""

from __future__ import annotations

from typing import Any

from stasis.cases.spec import EMPTYDIR, ENVIRONMENT, PROGRAMS, VOLUME, World
from stasis.local.container import ALL_CAPABILITIES, DEFAULT_CAPABILITIES

Object = dict[str, Any]

SITE = "/site"
CONTAINER, LOG = "node", "log"
POLICIES = {"keep": "Auto", "translate": "Translate"}
SERVER = """
import os, socket, threading
def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
def sink():
    while True:
        udp.recv(65536)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("", 9001))
threading.Thread(target=sink, daemon=True).start()
listener = socket.create_server(("", 9000))
while True:
    threading.Thread(target=echo, args=listener.accept()[:1], daemon=True).start()
"""
SERVER_PID = "/tmp/server"
# Programs make a step in a fraction of a second: they would be at their end before a suspend reaches their node.
PACE = """
import os, time
def sleep(seconds, *, _sleep=time.sleep, _pace=int(os.environ.get("PACE", 1))):
    _sleep(seconds * _pace if seconds < 0.5 else seconds)
time.sleep = sleep
"""
# The interface is taken down: from now on no answer of any kind, not even a reset.
FALL_SILENT = """
import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"eth0", 0))
"""


def inexpressible(world: World) -> str:
    """What the case wants and no TrainJob's pod can be given; empty: nothing."""
    if world.cgroup_rw:
        return "a pod's /sys/fs/cgroup is read-only"
    if world.memlock is not None:
        return "a pod cannot set RLIMIT_MEMLOCK"
    if world.hugepages:
        return "a node's huge pages are set aside before its kubelet starts"
    if world.hostname2:
        return "a TrainJob's pods keep their host names"
    if world.shm2:
        return "a TrainJob's pods keep their volumes while it is suspended"
    return ""


def policies() -> list[Object]:
    """Checkpoints go with their jobs: nobody wants those of a case."""
    return [
        {
            "apiVersion": "stasis.dev/v1alpha1",
            "kind": "CheckpointPolicy",
            "metadata": {"name": name},
            "spec": {"addresses": addresses, "onDelete": "Delete"},
        }
        for name, addresses in POLICIES.items()
    ]


def pace() -> Object:
    """What lets a program sleep so many times longer between its steps as the variable PACE says."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "pace"}, "data": {"sitecustomize.py": PACE}}


def claim() -> Object:
    """Of the volume that all cases share, a folder each."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "pvc"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def job(name: str, program: str, world: World, image: str, *, pace: int, outside: str, pvc: bool) -> list[Object]:
    """The TrainJob of one pod, and its runtime. `outside`: the server's address; `pvc`: with the volume."""
    pod = _pod(name, world, image, pace, outside, pvc)
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": {"name": name},
            "spec": {
                "mlPolicy": {"numNodes": 1},
                "template": {"spec": {"replicatedJobs": [_replicated(pod)]}},
            },
        },
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": name, "labels": {"stasis.dev/policy": "translate" if world.ip2 else "keep"}},
            "spec": {
                "runtimeRef": {"kind": "TrainingRuntime", "name": name},
                "trainer": {"numNodes": 1, "command": ["python3", f"{PROGRAMS}/{program}", *world.args]},
            },
        },
    ]


def _replicated(pod: Object) -> Object:
    return {
        "name": CONTAINER,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"podReplacementPolicy": "Failed", "backoffLimit": 0, "template": {"spec": pod}},
        },
    }


def _pod(name: str, world: World, image: str, pace: int, outside: str, pvc: bool) -> Object:
    env = {
        **ENVIRONMENT,
        "PYTHONPATH": SITE,
        "PACE": str(pace),
        **({"OUTSIDE": outside} if outside else {}),
        **world.env,
    }
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    volumes: dict[str, Object] = {
        "programs": {"configMap": {"name": "programs"}},
        "pace": {"configMap": {"name": "pace"}},
        "emptydir": {"emptyDir": {}},
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": f"{world.shm[:-1]}{world.shm[-1].upper()}i"}},
    }
    mounts: list[Object] = [
        {"name": "programs", "mountPath": PROGRAMS},
        {"name": "pace", "mountPath": SITE},
        {"name": "emptydir", "mountPath": EMPTYDIR},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if pvc:
        volumes["volume"] = {"persistentVolumeClaim": {"claimName": "pvc"}}
        mounts.append({"name": "volume", "mountPath": VOLUME, "subPath": name})
    trainer = {
        "name": CONTAINER,
        "image": image,
        "env": [*({"name": key, "value": value} for key, value in env.items()), address],
        "securityContext": _security(world),
        "volumeMounts": mounts,
    }
    pod: Object = {
        "restartPolicy": "Never",
        "containers": [trainer],
        "volumes": [{"name": key, **value} for key, value in volumes.items()],
    }
    if world.log is not None:
        pod["initContainers"] = [_reader(world.log, image)]
    if world.uid:
        pod["securityContext"] = {"fsGroup": world.uid}
    return pod


def _security(world: World) -> Object:
    context: Object = {
        "runAsUser": world.uid,
        "runAsGroup": world.uid,
        "seccompProfile": {"type": "RuntimeDefault" if world.seccomp else "Unconfined"},
    }
    if world.caps == "none":
        context |= {"capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False}
    elif world.caps == "all":
        context["capabilities"] = {"add": [name for name in ALL_CAPABILITIES if name not in DEFAULT_CAPABILITIES]}
    return context


def _reader(log: str, image: str) -> Object:
    """A sidecar that says what the program writes into a file."""
    area, _, file = log.partition("/")
    path, volume = (EMPTYDIR, "emptydir") if area == "emptydir" else ("/dev/shm", "shm")
    follow = 'tail -n +1 -F "$0" 2>/dev/null & trap "sleep 1; kill $!; exit 0" TERM; wait'
    return {
        "name": LOG,
        "image": image,
        "restartPolicy": "Always",
        "command": ["sh", "-c", follow, f"{path}/{file}"],
        "volumeMounts": [{"name": volume, "mountPath": path}],
    }


def server(name: str, image: str) -> Object:
    """A TCP echo and a UDP sink in a pod of their own, whose process can be ended without its pod."""
    container = {
        "name": "server",
        "image": image,
        "command": ["sh", "-c", f'python3 -c "$0" & echo $! >{SERVER_PID}; exec sleep infinity', SERVER],
        "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}},
        "readinessProbe": {"tcpSocket": {"port": 9000}, "periodSeconds": 1},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }


def appender(name: str, case: str, image: str) -> Object:
    """A pod that appends to /pvc/data of a case."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "appender",
                    "image": image,
                    "command": ["sh", "-c", f"echo grown by another rank >>{VOLUME}/data"],
                    "volumeMounts": [{"name": "volume", "mountPath": VOLUME, "subPath": case}],
                }
            ],
            "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": "pvc"}}],
        },
    }
