"""What services that run uvicorn bound of HTTP: the work that few bytes make.

A packet is parsed in one turn of the loop, and what comes before the end of a head is kept, all of
it before anybody knows whose it is: without limits one stranger keeps everybody waiting, and takes
all memory. uvicorn itself is the services' to bring: a command does without.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, cast

MAX_HEAD_BYTES: Final = 64 << 10
"""Of a head, of what trails a body, or of anything else before the next of a body; uvicorn's own
limit where it parses in Python. Doubled, a stranger's connection takes 64 KiB more."""
MAX_FIELDS: Final = 100
"""Of a head, and of what trails a body: ours have eight, and proxies add a dozen. Without it one
connection of a stranger keeps the loop busy for good: a megabyte of fields takes 0.2 s. Doubled, a
packet takes half a millisecond."""
MAX_PIPELINED: Final = 64
"""Requests that wait for the answers before theirs, chosen by hand: our clients send none ahead.
Doubled, a packet of requests takes 20 ms instead of 10."""
MAX_CHUNKS: Final = 4096
"""Of a body: the longest report in chunks of 1 KiB. Without it a token whose chunks have one byte
each keeps the loop busy for good. Doubled, a packet of those takes 35 ms instead of 17."""
SMALL_CHUNK_BYTES: Final = 64
"""A body may have a chunk more for each, so that a file that is sent line by line gets through: its
lines have a hundred and more. Doubled, short lines do not."""


class HttpLimits:
    """End a connection that is much work; stands before uvicorn's `HttpToolsProtocol`.

    What is raised here the parser takes for a request that is none.
    """

    transport: asyncio.Transport
    headers: list[tuple[bytes, bytes]]
    pipeline: deque[Any]
    _ahead_bytes = 0
    _body_bytes = 0
    _chunks = 0

    def data_received(self, data: bytes) -> None:
        """Called by the loop for each packet."""
        self._ahead_bytes += len(data)
        cast("Any", super()).data_received(data)
        if self._ahead_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each field of a head, and of what trails a body."""
        if len(self.headers) >= MAX_FIELDS:
            raise ValueError(MAX_FIELDS)
        cast("Any", super()).on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser at the end of a head."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(MAX_PIPELINED)
        self._ahead_bytes = self._body_bytes = self._chunks = 0
        cast("Any", super()).on_headers_complete()

    def on_chunk_header(self) -> None:
        """Called by the parser for each chunk of a body."""
        self._chunks += 1
        if self._chunks > MAX_CHUNKS + self._body_bytes // SMALL_CHUNK_BYTES:
            raise ValueError(MAX_CHUNKS)

    def on_body(self, body: bytes) -> None:
        """Called by the parser for each piece of a body."""
        self._ahead_bytes = 0
        self._body_bytes += len(body)
        cast("Any", super()).on_body(body)
