"""Connections: which are kept, and how long one may leave a request or an answer half done.

uvicorn accepts every connection and waits for ever for what its peer has begun. Here every one is
watched, whatever it sends. What has begun to arrive arrives within `transfer_timeout_s`: the head
of a request, then its body; and an answer is taken within that time. Connections that have shown no
good token yet are few: one too many ends the oldest of them. So a flood ends itself, and a member
gets in beside it, because it shows its token with its first packet.

What is promised of requests is `RequestLimits`'s. Idle connections are uvicorn's to close.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from aqua_coordinator.metrics import Metrics

MAX_STRANGERS: Final = 512
"""Connections without a good token yet, chosen by hand: probes, scrapers, and members that have
just connected. Doubled, a turn of the loop under a flood of them takes 100 ms instead of 50."""
MAX_AHEAD_BYTES: Final = 1 << 20
"""What may arrive before a head is complete, or of a body that is not read: four times what the
loop reads at once. Doubled, strangers can make the coordinator hold 1 GiB instead of half."""


class Connection:
    """A transport that writes at once what it is given in one turn of the loop, and what it owes.

    uvicorn writes the head of an answer and its body one after the other, and each write is a
    system call and a packet of its own. Everything else is the real transport's.

    Attributes:
        owing_since_s: Since when a request is arriving, by `time.perf_counter`; None when none is.
        unread_since_s: Since when what was written has not all been taken; None when it has.
        caller, counts: Of the last good token, and what counts its requests; `RequestLimits`'s.
        ahead_bytes: Received since the last head, less what its body may have.
    """

    def __init__(self, transport: asyncio.Transport, strangers: dict[Connection, None]) -> None:
        self._transport = transport
        self._strangers = strangers
        self._strangers[self] = None
        self.caller: object = None
        self.counts: Any = None
        self._call_soon = asyncio.get_running_loop().call_soon
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing
        self.owing_since_s: float | None = time.perf_counter()
        self.unread_since_s: float | None = None
        self.ahead_bytes = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a transport has
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write in this turn of the loop."""
        if not self._parts:
            self._call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Write what there is, and close."""
        self._flush()
        self._transport.close()

    def prove(self, caller: object, counts: object) -> None:
        """A good token has come, other than the last."""
        self._strangers.pop(self, None)
        self.caller, self.counts = caller, counts

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()


class ConnectionLimits:
    """All connections of one server.

    Args:
        transfer_timeout_s: Time for a head, a body or an answer to get through.
        metrics: Where connections are counted that were closed.
    """

    def __init__(self, transfer_timeout_s: float, metrics: Metrics) -> None:
        self._timeout_s = transfer_timeout_s
        self._closed = metrics.connections_closed
        self._all: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}

    def protocol(self, make: Callable[..., Any], **arguments: Any) -> Any:  # noqa: ANN401 - uvicorn's
        """Uvicorn's protocol, watched; all by asyncio's own interface.

        Requests find their connection in the ASGI state.
        """
        connection: Connection
        state: dict[str, Connection] = {}
        protocol = make(**arguments | {"app_state": state})
        made, received, lost = (
            getattr(protocol, name)
            for name in ("connection_made", "data_received", "connection_lost")
        )

        def connection_made(transport: asyncio.Transport) -> None:
            nonlocal connection
            state["connection"] = connection = Connection(transport, self._strangers)
            self._all.add(connection)
            made(connection)
            if len(self._strangers) > MAX_STRANGERS:
                self._close(next(iter(self._strangers)), "crowded")

        def data_received(data: bytes) -> None:
            if connection.owing_since_s is None:
                connection.owing_since_s = time.perf_counter()
            connection.ahead_bytes += len(data)
            if connection.ahead_bytes > MAX_AHEAD_BYTES:
                self._close(connection, "overlong")
            else:
                received(data)

        def connection_lost(error: Exception | None) -> None:
            self._forget(connection)
            lost(error)

        protocol.connection_made, protocol.data_received = connection_made, data_received
        protocol.connection_lost = connection_lost
        return protocol

    def close_late(self) -> None:
        """Close those whose time is over; to be called once a second."""
        now_s = time.perf_counter()
        for connection in [*self._all]:
            if not connection.get_write_buffer_size():
                connection.unread_since_s = None
            elif connection.unread_since_s is None:
                connection.unread_since_s = now_s
            if now_s - (connection.unread_since_s or now_s) > self._timeout_s:
                self._close(connection, "unread")
            elif now_s - (connection.owing_since_s or now_s) > self._timeout_s:
                self._close(connection, "late")

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._strangers.pop(connection, None)

    def _close(self, connection: Connection, reason: str) -> None:
        self._closed.labels(reason).inc()
        self._forget(connection)
        # Not `close`, which would wait until the peer has taken what was written.
        connection.abort()
