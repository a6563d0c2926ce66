"""The gang protocol's transport on one machine."""

from __future__ import annotations

from stasis.core.driver import Driver
from stasis.core.messages import Message


class Bus:
    """Delivers messages between the drivers of this process."""

    def __init__(self) -> None:
        self.drivers: dict[str, Driver] = {}

    def send(self, to: str, message: Message) -> None:
        if driver := self.drivers.get(to):
            driver.post(message)
