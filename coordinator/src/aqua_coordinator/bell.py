"""Rings when the event stream has grown.

One connection waits for the stream on behalf of every client of this coordinator. It carries no
events: whoever hears the bell reads the stream from its own position, so a slow client holds up
nobody and nothing is queued for it here.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.pipeline import Pipeline
from aqua_protocol import UnavailableError

log = structlog.get_logger(__name__)

BLOCK_MS: Final = 5000
RETRY_S: Final = 0.5
REST_S: Final = 0.02
"""Between rings: a burst of changes wakes everybody once, and Redis is not asked for each."""


class Bell:
    """Wakes all who wait whenever events have been written. Rests while nobody does.

    Attributes:
        listeners: Streams being served; kept by those who serve them.
        closed: No ring will follow.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._rung: asyncio.Future[None] | None = None
        self._wanted = asyncio.Event()
        self.listeners = 0
        self.closed = False

    def next_ring(self) -> asyncio.Future[None]:
        """Done at the next ring. Take it before you read, so that no event falls in between."""
        self._wanted.set()
        if self._rung is None or self._rung.done():
            self._rung = asyncio.get_running_loop().create_future()
            if self.closed:
                self._rung.set_result(None)
        return self._rung

    def close(self) -> None:
        """Wake everybody for the last time."""
        self.closed = True
        self._ring()

    async def run(self) -> None:
        """Listen for ever; a Redis that is lost is tried again, and rings to be safe."""
        while True:
            await self._wanted.wait()
            try:
                await self._listen()
            except (RedisError, OSError, UnavailableError) as error:
                log.debug("event stream lost", error=str(error))
                await asyncio.sleep(RETRY_S)
            self._ring()

    async def _listen(self) -> None:
        """Ring for every change until nobody wants to know any more."""
        connection = await self._pipeline.listen()
        known: bytes | None = None
        try:
            while self.listeners:
                latest = await self._latest(connection)
                if latest != known:
                    known = latest
                    self._ring()
                # Answers at once if something was written since.
                await connection.send_command(
                    *("XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", KEYS["events"], known)
                )
                async with asyncio.timeout(2 * BLOCK_MS / 1e3):
                    await connection.read_response()
                await asyncio.sleep(REST_S)
            self._wanted.clear()
        finally:
            await self._pipeline.hang_up(connection)

    @staticmethod
    async def _latest(connection: AbstractConnection) -> bytes:
        """Position of the last event."""
        await connection.send_command("XREVRANGE", KEYS["events"], "+", "-", "COUNT", 1)
        entries: list[list[bytes]] = await connection.read_response()
        return entries[0][0] if entries else b"0-0"

    def _ring(self) -> None:
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)
