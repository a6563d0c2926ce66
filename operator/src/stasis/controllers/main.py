"""The controller of a cluster: `python -m stasis.controllers`. The environment sets its options too."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import click

from stasis import logs
from stasis.controllers.controller import Controller
from stasis.controllers.settings import Settings
from stasis.errors import StasisError
from stasis.kube.client import configuration


@click.command(context_settings={"auto_envvar_prefix": "STASIS"})
@click.option("--repository", required=True, help="Prefix of where checkpoints go; NAMESPACE/UID is added.")
@click.option("--namespace", envvar="POD_NAMESPACE", default="stasis-system", help="Ours.")
@click.option("--identity", envvar="POD_NAME", default="controller", help="In the lease; a random part is added.")
@click.option("--agent-port", type=int, default=9443)
@click.option("--http-port", type=int, default=8080, help="For health checks and Prometheus.")
@click.option("--lease-seconds", type=float, default=15.0)
@click.option("--lease-retry", type=float, default=2.0)
@click.option(
    "--certificates",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder with ca.crt, tls.crt, tls.key. Left out: the leader makes and rotates all of the installation.",
)
@click.option("--webhook-certificate", type=click.Choice(["managed", "external"]), default="managed")
@click.option("--kubeconfig", type=click.Path(path_type=Path), default=None, help="Default: that of our pod.")
@click.option("--log-level", default="info")
def main(log_level: str, **given: object) -> None:
    """Suspend and resume TrainJobs exactly."""
    logs.set_up(log_level)
    settings = Settings(**given)  # type: ignore[arg-type]
    if settings.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(settings.kubeconfig)  # kopf reads it there
    try:
        asyncio.run(_run(settings))
    except StasisError as error:
        raise click.ClickException(str(error)) from error


async def _run(settings: Settings) -> None:
    controller = Controller(settings, configuration(settings.kubeconfig))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, controller.stop)
    await controller.run()
