"""Tells event streams that there is something new to read.

One connection waits for the stream on behalf of every client of this coordinator. It carries no
events: each event stream, once woken, reads from its own position, so a slow client holds up
no other and nothing is queued for it here.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError

from aqua_coordinator.store.keys import KEYS
from aqua_protocol.supervision import resting

log = structlog.get_logger(__name__)

BLOCK_MS: Final = 5000
"""How long one XREAD waits; doubled, a connection lost in silence is noticed 10 s later."""
RETRY_S: Final = 0.5
"""After a lost connection; an embedded store restarts in less. Doubled, streams lag by 1 s."""
REST_S: Final = 0.02
"""Between two wake-ups: a burst of changes wakes streams once, and Redis is not asked for each.
Doubled, events arrive 20 ms later, and a burst costs half as many reads."""


class EventWatcher:
    """Wakes all who wait whenever events have been written. Rests while none does.

    Attributes:
        listeners: Streams being served; kept by those who serve them.
        closed: No change will be told any more.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._redis = Redis(connection_pool=pool)
        self._changed: asyncio.Future[None] | None = None
        self._wanted = asyncio.Event()
        self.listeners = 0
        self.closed = False

    def next_change(self) -> asyncio.Future[None]:
        """Done at the next change. Take it before you read, so that no event falls in between."""
        self._wanted.set()
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
            if self.closed:
                self._changed.set_result(None)
        return self._changed

    def close(self) -> None:
        """Wake all for the last time."""
        self.closed = True
        self.wake()

    async def run(self) -> None:
        """Listen for ever; a Redis that is lost is tried again, and counts as a change."""
        while True:
            with resting():
                await self._wanted.wait()
            try:
                await self._listen()
            except (RedisError, OSError) as error:
                log.debug("event stream lost", error=str(error))
                await asyncio.sleep(RETRY_S)
            finally:
                self.wake()

    async def _listen(self) -> None:
        """Wake for every change until no stream is left."""
        known = b"0-0"
        while self.listeners:
            async with asyncio.timeout(2 * BLOCK_MS / 1e3):
                last: Any = await self._redis.xrevrange(KEYS["events"], count=1)
                latest = last[0][0] if last else b"0-0"
                if latest != known:
                    known = latest
                    self.wake()
                # Answers at once if something was written since.
                with resting():
                    await self._redis.xread({KEYS["events"]: known}, count=1, block=BLOCK_MS)
            await asyncio.sleep(REST_S)
        self._wanted.clear()

    def wake(self) -> None:
        """Let all who wait look again."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
