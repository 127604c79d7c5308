"""How much of what one token sends is in work at once, by size; what is more waits in line, unread.

Requests are served on one loop and by one Redis, so a large one keeps all others waiting for as
long as it takes to read, to check and to book: 4096 leases take as long as hundreds of ordinary
reports. Limits of their number cannot bound that, since a fleet behind one token needs many small
ones. So each token has room for some bytes, and a body that is larger has it to itself. Whoever
fills it waits for itself, holds no memory of the coordinator meanwhile, and others have their turn
after one body.

Not promised: fairness within a token. Members that share one wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

ROOM_BYTES: Final = 1 << 20
"""Of bodies of one token in work at once: a report of the most leases. Doubled, one token can keep
all others waiting for a second report of that size, and the coordinator hold twice as much."""
FREE_BYTES: Final = 2 << 10
"""A body up to this size takes no room: an ordinary report, which comes to no more than the room
for as many as one token may have under way. Doubled, they come to twice the room."""
READING_BYTES: Final = 64 << 10
"""What a request without a body takes: a page of 1000 rows, the largest, is twice as long. Doubled,
one token reads eight pages at once instead of sixteen."""


class TokenRoom:
    """The room of one token."""

    __slots__ = ("__weakref__", "_left", "_line")

    def __init__(self) -> None:
        self._left = ROOM_BYTES
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size: int) -> Place:
        """Take room for `size` bytes, or all of it for more, once all before have had their turn.

        Whoever waits is not given up here: a body that is late ends its connection.
        """
        size = min(size, ROOM_BYTES)
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
    """Room that a request has taken."""

    __slots__ = ("_room", "_size")

    def __init__(self, room: TokenRoom, size: int) -> None:
        self._room, self._size = room, size

    def leave(self) -> None:
        """Give it up; once."""
        self._room._leave(self._size)  # noqa: SLF001 - a part of the same module
