"""A sink of limited speed: throttle.py PORT TARGET RATE forwards connections to another port of this machine, what
clients send at RATE bytes a second in all."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time


class Bucket:
    """Tokens for bytes: `wait(now, count)` is how long to wait before sending so many. Holds a tenth of a second's."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = self._most = rate / 10
        self._at = 0.0

    def wait(self, now: float, count: int) -> float:
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate) - count
        self._at = now
        return max(0.0, -self._tokens / self._rate)


async def forward(port: int, target: int, rate: float) -> None:
    bucket = Bucket(rate)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                if limited and (pause := bucket.wait(time.monotonic(), len(data))):
                    await asyncio.sleep(pause)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", target, limit=1 << 20)
        await asyncio.gather(copy(reader, downstream, True), copy(upstream, writer, False))

    server = await asyncio.start_server(serve, "127.0.0.1", port, limit=1 << 20)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
