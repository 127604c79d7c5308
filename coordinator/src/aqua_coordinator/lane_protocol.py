"""Hot requests straight from the wire to their operation, and their answers straight back.

ASGI costs a request of the fast lane more than its operation: a scope, channels to receive and
send, checks of what is sent. So this protocol, which is uvicorn's in everything else, calls the
gate itself when a request is of the lane and plain: complete head, announced length within the
operation's limit, no other request of the connection under way. Anything unusual (chunked bodies,
`Expect`, pipelining, escapes or queries in the path) goes the way of all requests, to the same gate
and the same answer. uvicorn's parser reads both kinds.

Answers of the other requests are gathered behind a cork: uvicorn writes the head and the body
separately, and uvloop hands every write to the kernel at once, two system calls and two packets
where one would do.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from aqua_coordinator.answers import Headers, error_answer
from aqua_coordinator.hot_routes import HotRoute
from aqua_coordinator.request_limits import RequestLimits
from aqua_protocol import RequestInvalidError

_NOT_HTTP: Final = 400
"""There is no content yet to be 422 about."""
_ASIDE: Final = (b"%", b"?", b"#")
"""What a path of the lane does not contain."""


class CorkedTransport:
    """A transport that gathers small writes; everything else goes to the real one.

    Args:
        transport: The connection's own.
        loop: On which the gathered bytes are written.
    """

    __slots__ = ("_gathered", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._gathered: list[bytes] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a transport has
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Gather; flow control counts the bytes from the next turn of the loop on."""
        if not self._gathered:
            self._loop.call_soon(self._pull)
        self._gathered.append(data)

    def write_now(self, data: bytes) -> None:
        """Write what has gathered, and this."""
        if self._gathered:
            self._pull()
        self._transport.write(data)

    def close(self) -> None:
        """Write what has gathered, then close."""
        self._pull()
        self._transport.close()

    def _pull(self) -> None:
        if self._gathered:
            self._transport.write(b"".join(self._gathered))
            self._gathered.clear()


class HotCycle:
    """One hot request and its answer, as far as uvicorn needs to know.

    Attributes:
        route, name, headers: Of the request, see `RequestLimits.answer`.
        parts: Of the body, as they come.
        started_s: When the head was complete.
        keep_alive: Whether the connection goes on afterwards; uvicorn clears it to shut down.
        disconnected: The client has gone.
        response_complete: The next request may be served.
        message_event: Set by uvicorn for whoever waits for the body; nobody does.
    """

    __slots__ = (
        *("disconnected", "headers", "keep_alive", "message_event", "name", "parts"),
        *("response_complete", "route", "started_s"),
    )

    def __init__(
        self,
        route: HotRoute,
        name: str,
        headers: dict[bytes, bytes],
        *,
        keep_alive: bool,
        message_event: asyncio.Event,
    ) -> None:
        self.route = route
        self.name = name
        self.headers = headers
        self.parts: list[bytes] = []
        self.started_s = time.perf_counter()
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.message_event = message_event


class LaneProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, corked, with a way of its own for hot requests."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*args, **options)
        gate = self.app
        assert isinstance(gate, RequestLimits), f"the application is {gate!r}"
        self._gate = gate
        self._unawaited = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own does
        """Take the connection, corked."""
        self._corked = CorkedTransport(transport, self.loop)
        super().connection_made(self._corked)  # type: ignore[arg-type] # as good as one

    def on_headers_complete(self) -> None:
        """Decide the request's way."""
        hot = self._hot_cycle()
        if hot is None:
            super().on_headers_complete()
        else:
            self.cycle = hot  # type: ignore[assignment] # as much of one as is used

    def on_body(self, body: bytes) -> None:
        """Gather the body; its length has been announced and allowed."""
        hot = self.cycle
        if isinstance(hot, HotCycle):
            hot.parts.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Serve a hot request, now that it is complete."""
        hot = self.cycle
        if isinstance(hot, HotCycle):
            self.tasks.add(self.loop.create_task(self._serve(hot)))
        else:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the shape of all refusals."""
        error = RequestInvalidError(msg, remedy="Speak HTTP/1.1.")
        _, headers, body = error_answer(error)
        self._corked.write_now(_message(_NOT_HTTP, headers, body, keep_alive=False))
        self.transport.close()

    def _hot_cycle(self) -> HotCycle | None:
        """What the request begins, if it is hot and plain."""
        before: HotCycle | RequestResponseCycle | None = self.cycle
        parser = self.parser
        if before is not None and not before.response_complete:
            return None
        url = self.url
        if not url.isascii() or any(mark in url for mark in _ASIDE):
            return None
        found = self._gate.find(parser.get_method().decode(), url.decode())
        if found is None or self.expect_100_continue:
            return None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > found[0].max_body_bytes:
            return None
        if parser.should_upgrade() or parser.get_http_version() != "1.1":
            return None
        return HotCycle(
            *found,
            headers,
            keep_alive=parser.should_keep_alive(),
            message_event=self._unawaited,
        )

    async def _serve(self, hot: HotCycle) -> None:
        """Let the gate answer, and write the answer."""
        try:
            parts = hot.parts
            status, headers, body = await self._gate.answer(
                hot.route,
                hot.name,
                hot.headers,
                parts[0] if len(parts) == 1 else b"".join(parts),
                started_s=hot.started_s,
            )
            if self.flow.write_paused and not hot.disconnected:
                await self.flow.drain()
        except BaseException:
            # Cancelled: whoever waits for the answer had better know.
            self.transport.close()
            raise
        finally:
            self.tasks.discard(asyncio.current_task())
        if hot.disconnected:
            return
        hot.response_complete = True
        self._corked.write_now(_message(status, headers, body, keep_alive=hot.keep_alive))
        if not hot.keep_alive:
            self.transport.close()
        self.on_response_complete()


def _message(status: int, headers: Headers, body: bytes, *, keep_alive: bool) -> bytes:
    parts = [STATUS_LINE[status], *(b"%b: %b\r\n" % header for header in headers)]
    if not keep_alive:
        parts.append(b"connection: close\r\n")
    parts += (b"content-length: %d\r\n\r\n" % len(body), body)
    return b"".join(parts)
