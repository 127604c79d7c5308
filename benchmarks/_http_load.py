"""The load of `coordinator.py`: many connections, one process, prebuilt bytes.

Runs as its own process, so that making the load does not slow down what is measured. Each
connection has one request under way. `allocate` mode allocates a lease, releases it, and so on;
every lease id must be new and every answer must have the right status, or the run fails. `post`
mode repeats one POST. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import uvloop

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length: "


@dataclass
class Tally:
    """What all connections have seen."""

    until_s: float
    latencies_s: list[float] = field(default_factory=list)
    lease_ids: set[bytes] = field(default_factory=set)
    released: int = 0


class Connection(asyncio.Protocol):
    """One connection with one request under way."""

    def __init__(self, tally: Tally, *, allocate: bool, done: asyncio.Future[None]) -> None:
        self._tally = tally
        self._allocate = allocate
        self._done = done
        self._buffer = b""
        self._sent_s = 0.0
        self._releasing = False
        self._key = secrets.token_hex(8)
        self._count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        head_end = buffer.find(HEAD_END)
        if head_end < 0:
            self._buffer = buffer
            return
        at = buffer.find(LENGTH) + len(LENGTH)
        body_at = head_end + len(HEAD_END)
        if len(buffer) < body_at + int(buffer[at : buffer.find(b"\r", at)]):
            self._buffer = buffer
            return
        self._buffer = b""
        now_s = time.perf_counter()
        self._tally.latencies_s.append(now_s - self._sent_s)
        status, body = buffer[9:12], buffer[body_at:]
        try:
            self._take(status, body, now_s)
        except RuntimeError as error:
            self._done.set_exception(error)
            self._transport.close()

    def _take(self, status: bytes, body: bytes, now_s: float) -> None:
        if self._releasing:
            if status != b"200" or b'"state":"released"' not in body:
                raise RuntimeError(f"a release was answered {status!r} {body!r}")
            self._tally.released += 1
            self._releasing = False
        elif status != b"201":
            raise RuntimeError(f"a POST was answered {status!r} {body!r}")
        elif self._allocate:
            self._release(body)
            return
        if now_s >= self._tally.until_s:
            self._done.set_result(None)
            self._transport.close()
            return
        self._ask()

    def _ask(self) -> None:
        self._count += 1
        body = b'{"consumer_id":"bench","bytes":65536,"ttl_s":30.0}'
        self._send(
            b"/v1/leases", body, b"Idempotency-Key: %s-%d\r\n" % (self._key.encode(), self._count)
        )

    def _release(self, grant: bytes) -> None:
        at = grant.index(b'"lease_id":"') + 12
        lease_id = grant[at : grant.index(b'"', at)]
        if lease_id in self._tally.lease_ids:
            raise RuntimeError(f"{lease_id!r} was granted twice")
        self._tally.lease_ids.add(lease_id)
        at = grant.index(b'"epoch":') + 8
        epoch = grant[at : grant.index(b",", at)]
        self._releasing = True
        self._send(b"/v1/leases/%s/release" % lease_id, b'{"epoch":%s}' % epoch)

    def _send(self, path: bytes, body: bytes, header: bytes = b"") -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s"
            b"Content-Length: %d\r\n\r\n%s" % (path, header, len(body), body)
        )


async def load(port: int, *, connections: int, seconds: float, allocate: bool) -> Tally:
    """Load the server for some seconds."""
    loop = asyncio.get_running_loop()
    tally = Tally(until_s=time.perf_counter() + seconds)
    done = [loop.create_future() for _ in range(connections)]
    for future in done:
        await loop.create_connection(
            partial(Connection, tally, allocate=allocate, done=future),
            "127.0.0.1",
            port,
        )
    await asyncio.gather(*done)
    return tally


def main() -> None:
    """`_http_load.py allocate|post PORT CONNECTIONS SECONDS`."""
    mode, port, connections, seconds = sys.argv[1:]
    started_s, cpu_s = time.perf_counter(), time.process_time()
    tally = uvloop.run(
        load(
            int(port),
            connections=int(connections),
            seconds=float(seconds),
            allocate=mode == "allocate",
        )
    )
    elapsed_s = time.perf_counter() - started_s
    latencies_s = sorted(tally.latencies_s)
    print(
        json.dumps(
            {
                "requests": len(latencies_s),
                "requests_per_s": len(latencies_s) / elapsed_s,
                "p50_ms": latencies_s[len(latencies_s) // 2] * 1e3,
                "p99_ms": latencies_s[int(len(latencies_s) * 0.99)] * 1e3,
                "granted": len(tally.lease_ids),
                "released": tally.released,
                "cpu_share": (time.process_time() - cpu_s) / elapsed_s,
            }
        )
    )


if __name__ == "__main__":
    main()
