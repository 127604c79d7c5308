"""How much of what one token sends is in work at once, by size; what is more waits in line, unread.

Requests are served on one loop and by one Redis, so a large one keeps all others waiting for as
long as it takes to read, to check and to book: 4096 leases take as long as hundreds of ordinary
reports. Limits of their number cannot bound that, since a fleet behind one token needs many small
ones. So each token may have so many bytes in work, or one body that is larger. Its other requests
wait for these, take no memory of the coordinator meanwhile, and those of other tokens have their
turn after one body.

Not promised: fairness within a token. Members that share one wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

IN_WORK_BYTES: Final = 1 << 20
"""Of bodies of one token in work at once: a report of the most leases. Doubled, one token can keep
all others waiting for a second report of that size, and the coordinator hold twice as much."""
FREE_BYTES: Final = 2 << 10
"""A body up to this size does not wait: an ordinary report. As many as one token may have under way
come to what it may have in work; doubled, they come to twice that."""
READING_BYTES: Final = 64 << 10
"""What a request without a body takes: a page of 1000 rows, the largest, is twice as long. Doubled,
one token reads eight pages at once instead of sixteen."""


class TokenQueue:
    """What one token has in work, and what waits for its turn."""

    __slots__ = ("__weakref__", "_left", "_line")

    def __init__(self) -> None:
        self._left = IN_WORK_BYTES
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size: int) -> Place:
        """Wait for the turn of `size` bytes, which comes once all before have had theirs.

        There is no timeout here: a body that is late ends its connection.
        """
        size = min(size, IN_WORK_BYTES)
        if self._line or size > self._left:
            turn = asyncio.get_running_loop().create_future()
            self._line.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._leave(size)
                raise
        else:
            self._left -= size
        return Place(self, size)

    def _leave(self, size: int) -> None:
        self._left += size
        while self._line and (self._line[0][1].done() or self._line[0][0] <= self._left):
            size, turn = self._line.popleft()
            if not turn.done():
                self._left -= size
                turn.set_result(None)


class Place:
    """A request's part of what is in work."""

    __slots__ = ("_queue", "_size")

    def __init__(self, queue: TokenQueue, size: int) -> None:
        self._queue, self._size = queue, size

    def leave(self) -> None:
        """Give it up; once."""
        self._queue._leave(self._size)  # noqa: SLF001 - a part of the same module
