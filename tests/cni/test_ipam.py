"""stasis-ipam before the real host-local: wished-for addresses, and addresses held while their pods are away."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CLUSTER = Path(__file__).parents[2] / "e2e/cluster"
Range = dict[str, str]
HERE: Range = {"subnet": "10.9.0.0/16", "rangeStart": "10.9.1.2", "rangeEnd": "10.9.1.5", "gateway": "10.9.1.1"}


def _made(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.split()[-1]


@pytest.fixture(scope="module")
def path() -> str:
    return f"{_made(CLUSTER / 'ipam.sh')}:{_made(CLUSTER / 'program.sh', 'cni')}/bin"


class Node:
    """What a container runtime does on a node: CNI's calls, for pods by name."""

    def __init__(self, path: str, folder: Path, ipam: dict[str, Any]) -> None:
        self.path, self.folder = path, folder
        self.ipam = {"type": "stasis-ipam", "dataDir": str(folder), **ipam}
        self._pods: dict[str, tuple[str, dict[str, str]]] = {}

    def call(self, command: str, pod: str) -> Any:
        namespace, annotations = self._pods[pod]
        conf = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "type": "bridge",
            "ipam": self.ipam,
            "runtimeConfig": {"io.kubernetes.cri.pod-annotations": annotations},
        }
        env = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": f"id-of-{pod}",
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": "/run/netns/of-the-pod",
            "CNI_PATH": self.path,
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={pod}",
        }
        program = f"{self.path.split(':')[0]}/stasis-ipam"
        done = subprocess.run(
            [program], input=json.dumps(conf), env=os.environ | env, capture_output=True, text=True, timeout=20
        )
        answer = json.loads(done.stdout or "{}")
        if done.returncode:
            raise ValueError(answer["msg"])
        return answer

    def add(self, pod: str, wish: str | None = None, namespace: str = "a") -> str:
        self._pods[pod] = (namespace, {} if wish is None else {"stasis.dev/pod-ip": wish})
        addresses = [ip["address"].split("/")[0] for ip in self.call("ADD", pod)["ips"]]
        return ",".join(addresses)

    def delete(self, pod: str) -> None:
        self.call("DEL", pod)


@pytest.fixture
def node(path: str, tmp_path: Path) -> Callable[..., Node]:
    def make(name: str = "here", **ipam: Any) -> Node:
        return Node(path, tmp_path / name, ipam or {"ranges": [[HERE]]})

    return make


def test_a_pod_without_the_annotation_gets_what_host_local_gives_and_leaves_nothing(node: Callable[..., Node]) -> None:
    here = node()
    addresses = []
    for number in range(8):
        addresses.append(here.add(f"pod-{number}"))
        here.delete(f"pod-{number}")
    assert set(addresses) == {"10.9.1.2", "10.9.1.3", "10.9.1.4", "10.9.1.5"}


def test_a_released_address_is_kept_for_its_namespace(node: Callable[..., Node]) -> None:
    here = node()
    kept = here.add("rank-0", wish="")
    here.delete("rank-0")
    others = [here.add(f"other-{number}", namespace="b") for number in range(3)]
    assert kept not in others
    here.delete("other-0")
    assert here.add("thief", wish=kept, namespace="b") != kept
    assert here.add("rank-0-again", wish=kept) == kept
    here.delete("rank-0-again")
    assert here.add("rank-0-later", wish=kept) == kept


def test_the_longest_held_address_goes_first_when_a_range_has_no_other(node: Callable[..., Node]) -> None:
    here = node()
    held = [here.add(f"rank-{number}", wish="") for number in range(4)]
    for when, number in enumerate((2, 0, 3, 1)):
        here.delete(f"rank-{number}")
        os.utime(here.folder / "pods" / held[number], (when, when))
    assert [here.add(f"new-{number}", namespace="b") for number in range(4)] == [held[n] for n in (2, 0, 3, 1)]
    with pytest.raises(ValueError, match="no IP addresses available"):
        here.add("one-too-many", namespace="b")


def test_an_address_of_another_nodes_range_is_given_where_the_subnet_is_shared(node: Callable[..., Node]) -> None:
    here = node()
    assert here.add("moved", wish="10.9.7.33") == "10.9.7.33"
    assert here.add("second", wish="10.9.7.33") != "10.9.7.33"
    here.delete("moved")
    assert not (here.folder / "pods/10.9.7.33").exists()  # it is at its home that it is held
    assert here.add("plain") == "10.9.1.3"


@pytest.mark.parametrize("wish", ["10.8.0.7", "10.9.1.1", "fd00::7", "nonsense", "10.9.7.1,10.8.0.7"])
def test_a_wish_that_cannot_be_met_gets_another_address(node: Callable[..., Node], wish: str) -> None:
    here = node()
    assert here.add("pod", wish=wish) == "10.9.1.2"


def test_both_families_are_kept(node: Callable[..., Node]) -> None:
    here = node(ranges=[[HERE], [{"subnet": "fd00:9::/112"}]])
    both = here.add("rank-0", wish="")
    here.delete("rank-0")
    here.add("other")
    assert here.add("rank-0-again", wish=both) == both == "10.9.1.2,fd00:9::2"


def test_host_locals_older_form_of_a_range_is_understood(node: Callable[..., Node]) -> None:
    here = node(subnet="10.9.1.0/24", rangeStart="10.9.1.2", rangeEnd="10.9.1.5")
    kept = here.add("rank-0", wish="")
    here.delete("rank-0")
    assert [here.add(f"other-{number}") for number in range(3)] == ["10.9.1.3", "10.9.1.4", "10.9.1.5"]
    assert here.add("rank-0-again", wish=kept) == kept
