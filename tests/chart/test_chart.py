"""The chart, rendered by the real helm."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.apiserver import REPO, program

CHART = REPO / "charts/stasis"
METRIC = re.compile(r"stasis_[a-z_]+")
SWITCHES = [f"metrics.{name}.enabled=true" for name in ("serviceMonitor", "prometheusRule", "dashboard")]


@pytest.fixture(scope="module")
def helm() -> Path:
    return program("helm") / "bin/helm"


def render(helm: Path, *values: str) -> list[Any]:
    command = [helm, "template", "stasis", CHART, "-n", "stasis-system", "--kube-version", "1.36.0"]
    for value in values:
        command += ["--set", value]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of(objects: list[Any], kind: str, name: str) -> Any:
    return next(one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name)


def test_helm_finds_nothing_to_complain_of(helm: Path) -> None:
    subprocess.run([helm, "lint", "--strict", CHART, "--kube-version", "1.36.0"], check=True)


def test_every_metric_of_alerts_and_dashboard_is_documented(helm: Path) -> None:
    objects = render(helm, *SWITCHES)
    documented = set(METRIC.findall((REPO / "docs/metrics.md").read_text()))
    dashboard = json.loads(of(objects, "ConfigMap", "stasis-dashboard")["data"]["stasis.json"])
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = of(objects, "PrometheusRule", "stasis")["spec"]["groups"][0]["rules"]
    for expression in shown + [rule["expr"] for rule in rules]:
        names = {name.removesuffix("_bucket") for name in METRIC.findall(expression)}
        assert names <= documented, expression
        assert names


def test_everything_of_a_switch_is_left_out_without_it(helm: Path) -> None:
    kinds = {one["kind"] for one in render(helm)}
    assert kinds.isdisjoint({"PodMonitor", "PrometheusRule"})
    bare = render(
        helm, "registry.enabled=false", "store.repository=registry.example.com/x", "networkPolicy.enabled=false"
    )
    kinds = {one["kind"] for one in bare}
    assert kinds.isdisjoint({"NetworkPolicy", "PersistentVolumeClaim", "CronJob"})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("webhook.replicas=0", "replicas"),
        ("agent.statePath=var/lib", "statePath"),
        ("controler.replicas=2", "controler"),
        ("images.pullPolicy=Sometimes", "pullPolicy"),
        ("registry.enabled=false", "checkpoints need a place"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(helm: Path, value: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        render(helm, value)


def test_secrets_of_other_namespaces_are_read_only_where_that_is_asked_for(helm: Path) -> None:
    def secrets(objects: list[Any]) -> list[Any]:
        rules = of(objects, "ClusterRole", "stasis-controller")["rules"]
        return [rule for rule in rules if "secrets" in rule["resources"]]

    assert secrets(render(helm)) == []
    assert secrets(render(helm, "controller.readRegistrySecrets=true")) != []


def test_nothing_but_the_agent_is_privileged(helm: Path) -> None:
    for one in render(helm):
        template = one.get("spec", {}).get("template") if one["kind"] in ("Deployment", "DaemonSet", "Job") else None
        if template is None:
            continue
        privileged = [c["name"] for c in template["spec"]["containers"] if c["securityContext"].get("privileged")]
        assert privileged == (["agent"] if one["metadata"]["name"] == "stasis-agent" else [])
        if one["metadata"]["name"] != "stasis-agent":
            assert template["spec"]["securityContext"]["runAsNonRoot"]
            assert all(c["securityContext"]["readOnlyRootFilesystem"] for c in template["spec"]["containers"])


def test_every_workload_says_which_part_it_is(helm: Path) -> None:
    """By this label `kubectl stasis doctor` and people find them."""
    workloads = [one for one in render(helm) if one["kind"] in ("Deployment", "DaemonSet")]
    parts = {one["metadata"]["name"]: one["metadata"]["labels"]["app.kubernetes.io/component"] for one in workloads}
    assert parts == {f"stasis-{part}": part for part in ("agent", "controller", "registry", "webhook")}
    for one in workloads:
        inside = one["spec"]["template"]["metadata"]["labels"]
        assert inside["app.kubernetes.io/component"] == parts[one["metadata"]["name"]]
