"""One write for each answer.

uvicorn writes the head of an answer and its body separately, and uvloop hands every write to the
kernel at once: two system calls and two packets where one would do. Behind a cork, what a
connection writes within one turn of the loop leaves together at its end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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

    def close(self) -> None:
        """Write what has gathered, then close."""
        self._pull()
        self._transport.close()

    def _pull(self) -> None:
        if self._gathered:
            self._transport.write(b"".join(self._gathered))
            self._gathered.clear()


class CorkedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol behind a cork."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, corked."""
        super().connection_made(CorkedTransport(transport, self.loop))  # type: ignore[arg-type]
