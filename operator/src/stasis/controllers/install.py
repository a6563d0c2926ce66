"""Checks of an installation by the chart's hooks: before an uninstall, and by `helm test`."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from collections.abc import Callable

import click
from lightkube import Client, operators

from stasis.api import names
from stasis.core.gate import Held, Resume, Suspend, parse_gate
from stasis.errors import StasisError, UsageError
from stasis.kube.client import (
    Checkpoints,
    JobSets,
    MutatingWebhookConfigurations,
    Pods,
    Policies,
    annotation,
    configuration,
    connect,
    meta,
    ready,
    translated,
)
from stasis.store.connect import open_repository


def guard(client: Client) -> list[str]:
    """Raises StasisError, naming them, while suspended jobs depend on checkpoints (rule 37)."""
    with translated("jobsets"):
        jobsets = list(client.list(JobSets, namespace="*", labels={names.POLICY_LABEL: operators.exists()}))
    if waiting := sorted(filter(None, map(_depends, jobsets))):
        raise StasisError(
            f"{len(waiting)} suspended TrainJobs depend on their checkpoints: {', '.join(waiting)}",
            remedy="resume or delete them first; `helm uninstall --no-hooks` lets them start at step 0 one day",
        )
    return ["no suspended job depends on a checkpoint"]


def _depends(jobset: object) -> str:
    """`NAMESPACE/NAME (CHECKPOINT)` of a JobSet that is suspended with a checkpoint; empty for any other."""
    about = meta(jobset)
    try:
        gate = parse_gate(annotation(jobset, names.GATE))
    except UsageError:
        return ""
    match gate:
        case Held(checkpoint):
            name = checkpoint
        case Suspend(checkpoint):
            name = checkpoint
        case Resume(stamp) if stamp is not None:
            name = stamp.checkpoint
        case _:
            name = ""
    return f"{about['namespace']}/{about['name']} ({name})" if name else ""


def self_test(client: Client, namespace: str, repository: str) -> list[str]:
    """What was found to work, one line each; raises StasisError for the first thing that does not."""
    lines = []
    for kind, what in ((Checkpoints, "trainjobcheckpoints"), (Policies, "checkpointpolicies")):
        with translated(what):
            found = sum(1 for _ in client.list(kind, namespace="*"))
        lines.append(f"the API server serves {what} ({found} there)")
    with translated("agents"):
        agents = list(client.list(Pods, namespace=namespace, labels={"app.kubernetes.io/component": "agent"}))
    unready = [meta(pod)["name"] for pod in agents if not ready(pod)]
    if unready or not agents:
        raise StasisError(
            f"agents that are not ready: {', '.join(unready) or 'all'}", remedy=f"kubectl -n {namespace} logs POD"
        )
    lines.append(f"{len(agents)} agents are ready")
    _webhook(client, namespace)
    lines.append("the API server can call the webhook")
    with open_repository(f"{repository}/self-test") as store:
        store.tags()
    lines.append(f"checkpoints can go to {repository}")
    return lines


def _webhook(client: Client, namespace: str) -> None:
    """It answers under the certificate that the API server was told to trust."""
    with translated("mutatingwebhookconfiguration stasis"):
        configuration = client.get(MutatingWebhookConfigurations, "stasis")
    for webhook in configuration["webhooks"]:
        if not (bundle := webhook["clientConfig"].get("caBundle")):
            raise StasisError(
                f"the API server knows no authority for {webhook['name']}", remedy="wait until a controller leads"
            )
    context = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
    host = f"stasis-webhook.{namespace}.svc"
    try:
        with socket.create_connection((host, 443), timeout=10) as link, context.wrap_socket(link, server_hostname=host):
            pass
    except OSError as error:
        raise StasisError(f"the webhook does not answer at {host}: {error}") from error


@click.group()
def main() -> None:
    """What the chart's hooks ask."""


@main.command("guard")
def _guard() -> None:
    """Before an uninstall: fail, naming them, while suspended jobs depend on checkpoints."""
    _answer(guard)


@main.command("self-test")
@click.option("--namespace", envvar="POD_NAMESPACE", required=True)
@click.option("--repository", envvar="STASIS_REPOSITORY", required=True)
@click.option("--patience", type=float, default=60.0, help="Seconds that an installation may take to be complete.")
def _self_test(namespace: str, repository: str, patience: float) -> None:
    """Whether the installation works."""
    _answer(lambda client: self_test(client, namespace, repository), patience)


def _answer(ask: Callable[[Client], list[str]], patience: float = 0.0) -> None:
    client, end = connect(configuration()), time.monotonic() + patience
    while True:
        try:
            return click.echo("\n".join(ask(client)))
        except StasisError as error:
            if time.monotonic() > end:
                raise click.ClickException(str(error)) from error
        time.sleep(2)


if __name__ == "__main__":
    main()
