"""`python -m stasis.webhook`: settings come from the environment, see settings.py."""

from __future__ import annotations

import asyncio
import sys

from stasis.errors import StasisError
from stasis.kube.client import configuration, connect_async
from stasis.logs import set_up
from stasis.webhook.server import Server
from stasis.webhook.settings import Settings


async def _run(settings: Settings) -> None:
    await Server(settings, connect_async(configuration())).run()


def main() -> int:
    try:
        settings = Settings.from_environment()
        set_up(settings.log_level)
        asyncio.run(_run(settings))
    except StasisError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
