"""The agent of a node: `python -m stasis.daemon`. The environment sets its options too: STASIS_NODE for --node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from aiohttp import web

from stasis import __version__, doctor, logs
from stasis.agent import provision
from stasis.agent.agent import Agent
from stasis.agent.fingerprint import criu_version
from stasis.agent.journal import BOOT_ID
from stasis.core.frames import Home
from stasis.daemon import records
from stasis.daemon.certificates import Folder
from stasis.daemon.metrics import Metrics
from stasis.daemon.pods import ApiPods
from stasis.daemon.ranks import Ranks
from stasis.daemon.server import Connections, Server
from stasis.daemon.uploads import Uploads
from stasis.errors import StasisError
from stasis.kube.client import configuration, connect
from stasis.kube.records import ApiRecords

log = logging.getLogger("stasis.daemon")

RENEWED = 5.0  # seconds between two looks at our certificates
SWEEP = 60.0  # seconds between two looks for operations that are over


@dataclass(frozen=True)
class Settings:
    node: str
    state: Path
    certificates: Path
    host: str
    port: int
    node_port: int
    metrics_port: int
    kubeconfig: Path | None
    host_root: str
    kept: int


@click.command(context_settings={"auto_envvar_prefix": "STASIS"})
@click.option(
    "--node", envvar=["STASIS_NODE", "NODE_NAME"], default=socket.gethostname, help="This node's name in the cluster."
)
@click.option("--state", type=click.Path(path_type=Path), default="/var/lib/stasis", help="Folder that outlives us.")
@click.option(
    "--certificates", type=click.Path(path_type=Path), default="/etc/stasis/tls", help="ca.crt, tls.crt, tls.key."
)
@click.option("--host", default="", help="Address for controller and Prometheus; default: all of the node's.")
@click.option("--port", envvar=["STASIS_PORT", "STASIS_AGENT_PORT"], type=int, default=9443, help="For the controller.")
@click.option("--node-port", type=int, default=9480, help="For kubelet, on the loopback.")
@click.option("--metrics-port", type=int, default=9481, help="For Prometheus.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), default=None, help="Default: that of our pod.")
@click.option("--host-root", default="/", help="Where the node's root is seen; in a container: /proc/1/root.")
@click.option("--kept", type=int, default=10 << 30, help="Bytes of checkpoints that stay though a registry has them.")
@click.option("--log-level", default="info")
def main(log_level: str, **given: object) -> None:
    """Checkpoint and restore the ranks on this node, as the controller says."""
    logs.set_up(log_level)
    settings = Settings(**given)  # type: ignore[arg-type]
    os.environ["STASIS_STATE"] = str(settings.state)  # of the node's reservations
    try:
        asyncio.run(_serve(settings))
    except StasisError as error:
        raise click.ClickException(str(error)) from error
    finally:
        logging.shutdown()
    os._exit(0)  # threads that wait for the store or the API are left as a kill would leave them


async def _serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    folder = Folder(settings.certificates)
    folder.server()  # or nothing is begun
    client = connect(configuration(settings.kubeconfig))
    agent = Agent(settings.state, host=settings.host_root)
    metrics, connections = Metrics(), Connections()

    def of(home: Home) -> ApiRecords:
        return ApiRecords(client, home.namespace, home.name, home.uid)

    uploads = Uploads(agent.state, lambda home: records.need(client, home), settings.kept)
    ranks = Ranks(
        agent,
        ApiPods(client),
        of,
        lambda home, op: records.over(client, home, op),
        uploads,
        connections.send,
        _end,
        metrics,
    )
    bundle = agent.node.bundle
    node: dict[str, Any] = {
        "node": settings.node,
        "version": __version__,
        "boot": BOOT_ID.read_text().strip(),
        "criu": criu_version(bundle),
        "inits": sorted(provision.init_builds()),
    }
    server = Server(ranks, uploads, connections, metrics, node)
    await loop.run_in_executor(None, ranks.take_over)
    async with (
        _listening(server.kubelet(), "127.0.0.1", settings.node_port),
        _listening(server.everybody(), settings.host, settings.metrics_port),
        contextlib.AsyncExitStack() as tasks,
    ):
        for task in (_serve_controllers(server, settings, folder, metrics), _sweep(ranks)):
            tasks.callback(asyncio.create_task(task).cancel)
        log.info("serving", extra=node)
        node["checks"] = [asdict(check) for check in await loop.run_in_executor(None, lambda: doctor.checks(node=True))]
        await over.wait()
    log.info("ending")
    await loop.run_in_executor(None, ranks.close)


@contextlib.asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[None]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
        yield
    finally:
        await runner.cleanup()


async def _serve_controllers(server: Server, settings: Settings, folder: Folder, metrics: Metrics) -> None:
    """Listen anew when our certificates were renewed; connections that are open stay so."""
    runner = web.AppRunner(server.controllers(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site, stamp = None, None
    try:
        while True:
            try:
                now = folder.stamp()
                if now != stamp:
                    context = folder.server()
                    if site is not None:
                        await site.stop()
                    site = web.TCPSite(runner, settings.host or None, settings.port, ssl_context=context)
                    await site.start()
                    stamp = now
                    metrics.certificate.set(folder.expiry())
                    log.info("listening for the controller")
            except (OSError, StasisError) as error:
                log.warning("certificates: %s", error)
            await asyncio.sleep(RENEWED)
    finally:
        await runner.cleanup()


async def _sweep(ranks: Ranks) -> None:
    while True:
        await asyncio.get_running_loop().run_in_executor(None, ranks.sweep)
        await asyncio.sleep(SWEEP)


def _end(error: BaseException) -> None:
    """What a broken driver leaves is put right at the next start, as after any death of the agent."""
    log.critical("the protocol's driver failed", exc_info=error)
    os._exit(1)
