"""Connections: which are kept, and how long one may leave a request or an answer half done.

uvicorn accepts every connection and waits for ever for what its peer has begun. Here every one is
watched, whatever it sends. What has begun to arrive arrives within `transfer_timeout_s`: the head
of a request, then its body; and an answer is taken within that time. Connections that have shown no
good token yet are few: one too many ends the oldest of them. So a flood ends itself, and a member
gets in beside it, because it shows its token with its first packet. How many connections tokens may
have is for `RequestLimits` to say, who knows them.

A head has few fields, a body few chunks, and few requests are sent ahead of their answers
(`Protocol`): a packet is parsed in one turn of the loop, and calls us for each of these.

TLS is spoken here, too: handshakes are watched as all else is, a refused one is told why, and each
takes the certificates as they are now. A connection that was made with other ones, or whose client
certificate has expired, ends with its next answer; an answer without an end asks `remaining_s`.

What is promised of requests is `RequestLimits`'s. Idle connections are uvicorn's to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

import structlog

from aqua_client.tls import TlsFiles
from aqua_coordinator.metrics import Metrics
from aqua_protocol.supervision import resting

log = structlog.get_logger(__name__)

MAX_STRANGERS: Final = 512
"""Connections without a good token yet, chosen by hand: probes, scrapers, and members that have
just connected. Doubled, a turn of the loop under a flood of them takes 100 ms instead of 50."""
PATROL_S: Final = 0.1
"""Seconds between looks at a tenth of the active connections each. Doubled, a late one stays up to
a second longer."""
MAX_AHEAD_BYTES: Final = 1 << 20
"""What may arrive before a head is complete, or of a body that is not read: four times what the
loop reads at once. Doubled, strangers can make the coordinator hold 1 GiB instead of half."""
RECORD_BYTES: Final = 16 << 10
"""Fixed by TLS: the most that one record holds."""
TICKS_PER_ROUND: Final = 10
"""Looks until every active connection has had one: 10,000 at once would hold the loop up for 20 ms.
Doubled, what is late is closed a second later."""


class Connection:
    """A transport that writes at once what it is given in one turn of the loop, and what it owes.

    uvicorn writes the head of an answer and its body one after the other, and each write is a
    system call and a packet of its own. Everything else is the real transport's.

    Attributes:
        owing_since_s: Since when a request is arriving, by `time.perf_counter`; None when none is.
        unread_since_s: Since when what was written has not all been taken; None when it has.
        caller, counts: Of the last good token, and what counts its requests; `RequestLimits`'s.
        places: What counts this connection; `RequestLimits`'s, too.
        reports: Whether it is counted as one that reports.
        ahead_bytes: Received since the last head, less what its body may have.
        certified: Whether the peer has shown a certificate that we trust.
        ends: Whether the connection ends with the next answer.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        strangers: dict[Connection, None],
        active: set[Connection],
    ) -> None:
        self._transport = transport
        self._strangers, self._active = strangers, active
        self._strangers[self] = None
        self._active.add(self)
        self.caller: object = None
        self.counts: Any = None
        self.places: list[Any] = []
        self.reports = False
        self._call_soon = asyncio.get_running_loop().call_soon
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.owing_since_s: float | None = time.perf_counter()
        self.unread_since_s: float | None = None
        self.ahead_bytes = 0
        self.certified = self.ends = False

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

    def remaining_s(self) -> float:
        """How long what its peer has shown of itself is good, apart from a token."""
        return math.inf

    def prove(self, caller: object, counts: object) -> None:
        """A good token has come, other than the last."""
        self._strangers.pop(self, None)
        self.caller, self.counts = caller, counts

    def leave(self) -> None:
        """Give up its places."""
        for counted in self.places:
            counted.leave()
        self.places.clear()

    def _flush(self) -> None:
        if self._parts and not self.is_closing():
            self._transport.write(b"".join(self._parts))
            self._note_written()
        self._parts.clear()

    def _note_written(self) -> None:
        if not self.is_closing():
            self._active.add(self)


class TlsConnection(Connection):
    """A connection whose bytes are TLS's, by `ssl`'s objects in memory.

    The loop's own TLS would not do: there a handshake is no connection yet, so it cannot be counted
    or ended, and a peer that is refused does not learn why.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        strangers: dict[Connection, None],
        active: set[Connection],
        files: TlsFiles,
    ) -> None:
        super().__init__(transport, strangers, active)
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._files, self._context = files, files.context()
        self._tls = self._context.wrap_bio(self._received, self._to_send, server_side=True)
        self._good_until_s = math.nan

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - asyncio's
        """Give what any transport gives; by the context uvicorn knows that this is https."""
        found = self._context if name == "sslcontext" else None
        return found or self._transport.get_extra_info(name, default)

    def decrypt(self, data: bytes) -> bytes:
        """What came; nothing as long as there is less than a record, or no end of the handshake.

        Raises:
            ssl.SSLError: It is not TLS, or the peer's certificate is no good; the peer is told.
        """
        self._received.write(data)
        parts = []
        try:
            if math.isnan(self._good_until_s):
                self._tls.do_handshake()
                certificate = self._tls.getpeercert() or {}
                self.certified = bool(certificate)
                until = str(certificate.get("notAfter", ""))
                self._good_until_s = ssl.cert_time_to_seconds(until) if until else math.inf
            while part := self._tls.read(RECORD_BYTES):
                parts.append(part)
            self.close()  # The peer has said that it will send no more.
        except ssl.SSLWantReadError:
            pass
        finally:
            self._send()
        return b"".join(parts)

    def ages(self, context: ssl.SSLContext | None, now_s: float) -> None:
        """Look whether certificates have changed since the handshake, or have expired."""
        self.ends = self._context is not context or self._good_until_s <= now_s

    def remaining_s(self) -> float:
        """How long its certificates are good."""
        if self._files.context() is not self._context:
            return 0.0
        return max(0.0, self._good_until_s - time.time())

    def close(self) -> None:
        """Say that this is all, and close."""
        self._flush()
        with contextlib.suppress(ssl.SSLError):  # It would wait for the peer to say so as well.
            self._tls.unwrap()
        self._send()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            left = memoryview(b"".join(self._parts))
            while left:
                left = left[self._tls.write(left) :]
            self._send()
        self._parts.clear()

    def _send(self) -> None:
        if self._to_send.pending:
            self._transport.write(self._to_send.read())
            self._note_written()


class ConnectionLimits:
    """All connections of one server.

    Args:
        transfer_timeout_s: Time for a head, a body or an answer to get through.
        metrics: Where connections are counted that were closed.
        tls: Of the server; None where connections are plain.
    """

    def __init__(
        self, transfer_timeout_s: float, metrics: Metrics, tls: TlsFiles | None = None
    ) -> None:
        self._timeout_s = transfer_timeout_s
        self._tls = tls
        self._context = None if tls is None else tls.context()
        self._refused: list[str] = []
        self._closed = metrics.connections_closed
        # All that owe something, or may: an idle one costs nothing until it is used again.
        self._active: set[Connection] = set()
        self._round, self._share = iter(list[Connection]()), 0
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
            state["connection"] = connection = self._connection(transport)
            made(connection)
            if len(self._strangers) > MAX_STRANGERS:
                self._close(next(iter(self._strangers)), "crowded")

        def data_received(data: bytes) -> None:
            if self._tls is not None and not (data := self._decrypted(connection, data)):
                return
            if connection.owing_since_s is None:
                connection.owing_since_s = time.perf_counter()
                self._active.add(connection)
            connection.ahead_bytes += len(data)
            if connection.ahead_bytes > MAX_AHEAD_BYTES:
                self._close(connection, "overlong")
            else:
                received(data)

        def connection_lost(error: Exception | None) -> None:
            self._forget(connection)
            lost(error)
            # What refers to itself would be left to the collector, which stops the loop to find it.
            for name in ("connection_made", "data_received", "connection_lost"):
                delattr(protocol, name)
            protocol.cycle = None

        protocol.connection_made, protocol.data_received = connection_made, data_received
        protocol.connection_lost = connection_lost
        return protocol

    def _connection(self, transport: asyncio.Transport) -> Connection:
        if self._tls is None:
            return Connection(transport, self._strangers, self._active)
        return TlsConnection(transport, self._strangers, self._active, self._tls)

    def _decrypted(self, connection: Connection, data: bytes) -> bytes:
        assert isinstance(connection, TlsConnection), connection
        try:
            plain = connection.decrypt(data)
        except ssl.SSLError as error:
            self._refused.append(str(error))
            self._close(connection, "refused")
            return b""
        # A first request may come with the end of the handshake.
        connection.ages(self._context, time.time())
        return plain

    async def close_late_ones(self) -> None:
        """Close those whose time is over, for ever, looking at a tenth of the active at a time."""
        while True:
            self._close_late()
            with resting():
                await asyncio.sleep(PATROL_S)

    def _close_late(self) -> None:
        now_s = time.perf_counter()
        if self._refused:
            log.warning("TLS refused", connections=len(self._refused), last=self._refused[-1])
            self._refused.clear()
        self._context = None if self._tls is None else self._tls.context()
        due = [*islice(self._round, self._share)]
        if not due:
            self._round = iter([*self._active])
            self._share = -(-len(self._active) // TICKS_PER_ROUND)
        for connection in self._active.intersection(due):
            if not connection.get_write_buffer_size():
                connection.unread_since_s = None
            elif connection.unread_since_s is None:
                connection.unread_since_s = now_s
            if now_s - (connection.unread_since_s or now_s) > self._timeout_s:
                self._close(connection, "unread")
            elif now_s - (connection.owing_since_s or now_s) > self._timeout_s:
                self._close(connection, "late")
            elif connection.unread_since_s is None and connection.owing_since_s is None:
                self._active.discard(connection)

    def _forget(self, connection: Connection) -> None:
        self._active.discard(connection)
        self._strangers.pop(connection, None)
        connection.leave()

    def _close(self, connection: Connection, reason: str) -> None:
        self._closed.labels(reason).inc()
        self._forget(connection)
        if reason == "refused":  # An alert is short, and has been written.
            connection.close()
        else:  # Not `close`, which would wait until the peer has taken what was written.
            connection.abort()
