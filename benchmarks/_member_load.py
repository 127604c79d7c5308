"""The load of `scale.py`: many members, one process, each reporting when the coordinator says.

Half are producers, half consumers, eight to a scale-up domain; each consumer holds one lease. A
member reports again after the time that the last answer named, by its own timer: the rate follows
from the coordinator's answers. Reports are bytes made before, but for their revision. In phases
with grants consumers also ask for leases, at a fixed rate, and release them. What is refused for
want of room is repeated and counted; any other answer must be a success, or the run fails.

Prints a line of JSON at the end of each phase: how many reports and grants there were, how long
they took, what share of a core this process took and how late its timers were. What is late here is
not the coordinator's.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import uvloop

from aqua_protocol import PROTOCOL_VERSION, TransportKind
from aqua_protocol.members import ConsumerReport, ProducerReport

SLAB_BYTES: Final = 65_536
PRODUCER_SLABS: Final = 1024
DOMAIN_MEMBERS: Final = 8
JOINING: Final = 32
"""Members that join at once, far below what one token may have under way."""
GRANTS_PER_S: Final = 50
TICK_S: Final = 0.05
REVISION: Final = 123_456_789
"""Stands where a report's revision will be."""


class Connection(asyncio.Protocol):
    """One connection; requests wait for each other."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._buffer = b""
        self._waiting: deque[tuple[bytes, asyncio.Future[tuple[bytes, float]]]] = deque()
        self._sent_s = 0.0
        self.refusals = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for _, answered in self._waiting:
            if not answered.done():
                answered.set_exception(exc or ConnectionError("the server hung up"))

    def ask(self, line: bytes, body: bytes, header: bytes = b"") -> asyncio.Future[Any]:
        """Send a request; gives the body of its answer and how long it took, in seconds."""
        answered: asyncio.Future[tuple[bytes, float]] = asyncio.get_running_loop().create_future()
        request = b"%s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n%s" % (
            *(line, self._head, header, len(body)),
            body,
        )
        self._waiting.append((request, answered))
        if len(self._waiting) == 1:
            self._send()
        return answered

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._waiting[0][0])

    def _refused(self) -> bool:
        """No room: the same again after a while, as members do."""
        self.refusals += 1
        asyncio.get_running_loop().call_later(random.uniform(0.5, 1.0), self._send)
        return True

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        body_at = self._buffer.find(b"\r\n\r\n") + 4
        at = self._buffer.find(b"content-length: ") + 16
        if body_at < 4 or len(self._buffer) < body_at + int(
            self._buffer[at : self._buffer.find(b"\r", at)]
        ):
            return
        answer, self._buffer = self._buffer, b""
        request, answered = self._waiting.popleft()
        if answered.done():  # Its member has been stopped.
            pass
        elif answer[9:12] == b"503" and self._refused():
            self._waiting.appendleft((request, answered))
            return
        elif answer[9:10] != b"2":
            answered.set_exception(RuntimeError(f"a request was answered {answer!r}"))
        else:
            answered.set_result((answer[body_at:], time.perf_counter() - self._sent_s))
        if self._waiting:
            self._send()


class Member:
    """One member: its report in bytes, and its connection, which it may share."""

    def __init__(self, load: Load, number: int, connection: Connection) -> None:
        self._load = load
        self.connection = connection
        self.is_producer = number % 2 == 0
        self.name = f"{'producer' if self.is_producer else 'consumer'}-{number:06}"
        kind = "producers" if self.is_producer else "consumers"
        self._line = f"PUT /v1/{kind}/{self.name}".encode()
        self._revision = 0
        self.heartbeat_s = 0.0
        self.fields: dict[str, Any] = {
            "incarnation": secrets.token_hex(8),
            "revision": REVISION,
            "protocol_version": PROTOCOL_VERSION,
            "aqualib_version": "bench",
            "node": f"node-{number // DOMAIN_MEMBERS}",
            "domain": f"domain-{number // DOMAIN_MEMBERS}",
            "gpu_uuid": f"GPU-{secrets.token_hex(16)}",
            "pid": 4711,
            "model": "org-model",
            f"{self.name[:8]}_id": self.name,
            "leases": [],
        }
        if self.is_producer:
            self.fields |= {
                "endpoint": f"/run/aqua/{self.name}.sock",
                "transport": TransportKind.CUDA_VMM,
                "slab_bytes": SLAB_BYTES,
                "offered_bytes": PRODUCER_SLABS * SLAB_BYTES,
            }
        self._changed()

    def _changed(self) -> None:
        kind = ProducerReport if self.is_producer else ConsumerReport
        body = kind.model_validate(self.fields).model_dump_json().encode()
        self._before, self._after = body.split(b"%d" % REVISION)

    async def report(self) -> None:
        """Report, and heed the heartbeat that the answer names."""
        body = b"%s%d%s" % (self._before, self._revision, self._after)
        self._revision += 1
        answer, took_s = await self.connection.ask(self._line, body)
        self._load.reports_s.append(took_s)
        if self.fields.get("books_id") is None and self.is_producer:
            self.fields["books_id"] = json.loads(answer)["books_id"]
            self._changed()
            await self.report()
            return
        at = answer.index(b'"heartbeat_s":') + 14
        self.heartbeat_s = float(answer[at : answer.index(b",", at)])

    async def hold_lease(self, producers: dict[str, Member]) -> None:
        """Ask for a lease, and name it in reports from now on, as its producer does."""
        lease, _ = await self.grant()
        producer = producers[lease["producer_id"]]
        shared = {"lease_id": lease["lease_id"], "epoch": lease["epoch"]}
        self.fields["leases"].append(shared | {"mapped_bytes": SLAB_BYTES})
        producer.fields["leases"].append(
            shared | {"consumer_id": self.name, "held_bytes": SLAB_BYTES}
        )
        for member in (producer, self):
            member._changed()  # noqa: SLF001 - of its own kind
            await member.report()

    async def grant(self) -> tuple[dict[str, Any], float]:
        """Ask for a lease; gives it and how long that took, in seconds."""
        body = b'{"consumer_id":"%s","bytes":%d,"ttl_s":600.0}' % (self.name.encode(), SLAB_BYTES)
        key = b"Idempotency-Key: %s\r\n" % secrets.token_hex(8).encode()
        answer, took_s = await self.connection.ask(b"POST /v1/leases", body, key)
        return json.loads(answer)["lease"], took_s

    async def live(self) -> None:
        """Report for ever, as often as asked."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self.heartbeat_s
            await asyncio.sleep(self.heartbeat_s)
            self._load.late_s.append(loop.time() - due_s)
            await self.report()


class Load:
    """All members, and what they have measured in this phase."""

    def __init__(self, port: int, count: int, connections: int, token: str) -> None:
        self._port = port
        self._count = count
        self._connection_count = min(connections, count)
        self._head = (
            f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\n"
        ).encode()
        self.members: list[Member] = []
        self._living: list[asyncio.Task[None]] = []
        self.reports_s: list[float] = []
        self.grants_s: list[float] = []
        self.late_s: list[float] = []

    async def run(self, seconds: float) -> None:
        """Join, keep to the heartbeat, and grant beside it."""
        async with asyncio.TaskGroup() as self._group:
            await self.phase("joined", self._join)
            # Everyone has been told the heartbeat of so many members, and its lease has been seen.
            await self.phase("settled", partial(asyncio.sleep, 1.2 * self._heartbeat_s() + 1))
            window_s = max(seconds, self._heartbeat_s())
            await self.phase("heartbeats", partial(asyncio.sleep, window_s))
            await self.phase("grants", partial(self._grant, seconds))
            await self.phase("scrapes", self._wait_for_parent)
            for task in self._living:
                task.cancel()

    def _heartbeat_s(self) -> float:
        return max((member.heartbeat_s for member in self.members), default=0.0)

    async def phase(self, name: str, act: Callable[[], Awaitable[None]]) -> None:
        """Do something and print what was measured meanwhile."""
        for measured in (self.reports_s, self.grants_s, self.late_s):
            measured.clear()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        await act()
        elapsed_s = time.perf_counter() - started_s
        print(
            json.dumps(
                {
                    "phase": name,
                    "seconds": elapsed_s,
                    "reports": len(self.reports_s),
                    "report_p50_ms": quantile_ms(self.reports_s, 0.5),
                    "report_p99_ms": quantile_ms(self.reports_s, 0.99),
                    "grants": len(self.grants_s),
                    "grant_p99_ms": quantile_ms(self.grants_s, 0.99),
                    "refusals": sum(
                        connection.refusals
                        for connection in {member.connection for member in self.members}
                    ),
                    "late_p99_ms": quantile_ms(self.late_s, 0.99),
                    "load_cpu_share": (time.process_time() - cpu_s) / elapsed_s,
                    "heartbeat_s": self._heartbeat_s(),
                }
            ),
            flush=True,
        )

    async def _join(self) -> None:
        share = -(-self._count // self._connection_count)
        # Those of one connection are neighbours: an engine that lends and takes.
        firsts = iter(range(0, self._count, share))
        await asyncio.gather(*(self._join_some(firsts, share) for _ in range(JOINING)))
        by_name = {member.name: member for member in self.members}
        consumers = iter([member for member in self.members if not member.is_producer])
        await asyncio.gather(*(self._lend_to_some(consumers, by_name) for _ in range(JOINING)))

    async def _join_some(self, firsts: Iterator[int], share: int) -> None:
        loop = asyncio.get_running_loop()
        for first in firsts:
            _, connection = await loop.create_connection(
                partial(Connection, self._head), "127.0.0.1", self._port
            )
            for number in range(first, min(first + share, self._count)):
                member = Member(self, number, connection)
                await member.report()
                self.members.append(member)
                self._living.append(self._group.create_task(member.live()))

    async def _lend_to_some(self, consumers: Iterator[Member], by_name: dict[str, Member]) -> None:
        for consumer in consumers:
            await consumer.hold_lease(by_name)

    async def _grant(self, seconds: float) -> None:
        """Grants at a fixed rate, spread over the consumers; a late tick is made up for."""
        consumers = [member for member in self.members if not member.is_producer]
        started_s = time.perf_counter()
        asked: list[asyncio.Task[None]] = []
        while (passed_s := time.perf_counter() - started_s) < seconds:
            while len(asked) < passed_s * GRANTS_PER_S:
                consumer = consumers[len(asked) * 7919 % len(consumers)]
                asked.append(asyncio.create_task(self._grant_and_release(consumer)))
            await asyncio.sleep(TICK_S / 5)
        await asyncio.gather(*asked)

    async def _grant_and_release(self, consumer: Member) -> None:
        lease, took_s = await consumer.grant()
        self.grants_s.append(took_s)
        body = b'{"epoch":%d}' % lease["epoch"]
        path = f"POST /v1/leases/{lease['lease_id']}/release"
        await consumer.connection.ask(path.encode(), body)

    async def _wait_for_parent(self) -> None:
        print(json.dumps({"phase": "scraping"}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


def quantile_ms(measured_s: list[float], share: float) -> float:
    """A quantile in milliseconds; 0 of nothing."""
    ordered = sorted(measured_s)
    return ordered[int(len(ordered) * share)] * 1e3 if ordered else 0.0


def main() -> None:
    """`_member_load.py PORT MEMBERS CONNECTIONS SECONDS`; the first line to read is the token."""
    port, count, connections, seconds = sys.argv[1:]
    token = sys.stdin.readline().strip()
    try:
        uvloop.run(Load(int(port), int(count), int(connections), token).run(float(seconds)))
    except* (RuntimeError, ConnectionError) as failed:
        raise SystemExit(str(failed.exceptions[0])) from None


if __name__ == "__main__":
    main()
