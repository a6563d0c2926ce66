"""The commands of the documentation do what it says, in its order."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.installation import ROOT
from e2e.lab import Cluster, Job
from tests.docs.blocks import Block, all_blocks, runnable

pytestmark = pytest.mark.e2e

QUICKSTART = "docs/quickstart.md"
EXAMPLE = "docs/examples/gpt.yaml"
IMAGE = "pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime"  # the example's


class Reader:
    """Follows pages with a copy of the repository's examples before them, in a namespace of its own."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.job = Job(cluster, "gpt", namespace)
        example = folder / EXAMPLE
        example.parent.mkdir(parents=True)
        text = (ROOT / EXAMPLE).read_text()
        assert IMAGE in text
        example.write_text(text.replace(IMAGE, f"{cluster.registry}/stasis-trainer:e2e"))
        config = folder / "kubeconfig"
        config.write_text(Path(cluster.environment["KUBECONFIG"]).read_text())
        cluster.kubectl("--kubeconfig", str(config), "config", "set-context", "--current", f"--namespace={namespace}")
        self.environment = {**cluster.environment, "KUBECONFIG": str(config)}

    def do(self, block: Block) -> str:
        reader = Cluster(self.environment)
        return reader.run("bash", "-euo", "pipefail", "-c", f"cd {self.folder}\n{block.text}", timeout=400)

    def wait_until_it_trains(self) -> None:
        self.cluster.wait(
            "the example trains", lambda: self.job.follow() and any("step" in s for s in self.job.lines(0))
        )


@pytest.fixture
def reader(cluster: Cluster, namespace: str, tmp_path: Path) -> Reader:
    return Reader(cluster, namespace, tmp_path)


def test_the_pages_commands_do_what_they_say(reader: Reader) -> None:
    others = [block for block in all_blocks() if block.runs and block.page != QUICKSTART]
    done = {}
    for block in runnable(QUICKSTART):
        if "delete trainjob" in block.text:
            for other in others:  # what they ask is asked while the quick start's job is there
                reader.do(other)
        done[str(block)] = reader.do(block)
        if "kubectl apply" in block.text:
            reader.wait_until_it_trains()
    said = "\n".join(done.values())
    assert "rank 0 step" in said
    reader.job.wait_for_no_pods()
