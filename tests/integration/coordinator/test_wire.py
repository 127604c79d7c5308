"""Hot requests over a real connection: whatever their shape on the wire, they are answered once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.server import Server
from aqua_coordinator.settings import CoordinatorSettings
from harness.bounds import HANG_S, async_until
from harness.ledger_room import ledger_room
from harness.members_on_paper import PaperConsumer, PaperProducer

RELEASE = "/v1/leases/nothing/release"
BODY = b'{"epoch":1}'


@contextlib.asynccontextmanager
async def serving(service: Service) -> AsyncIterator[tuple[str, int]]:
    """Where a coordinator's own HTTP server listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        server = Server(service)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


@pytest.fixture
async def address(service: Service) -> AsyncIterator[tuple[str, int]]:
    """Where the coordinator listens."""
    async with serving(service) as listening_at:
        yield listening_at


def in_flight(service: Service) -> float:
    """Requests that the coordinator is serving, by its own metrics."""
    name = "aqua_coordinator_requests_in_flight "
    lines = service.services.metrics.render(None).decode().splitlines()
    return float(next(line for line in lines if line.startswith(name)).removeprefix(name))


class Wire:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Wire:
        return cls(*await asyncio.open_connection(*address))

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and content of the next answer."""
        async with asyncio.timeout(HANG_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            content = await self.reader.readexactly(int(headers["content-length"]))
        is_json = headers["content-type"] == "application/json"
        return int(head[0].split(" ")[1]), headers, json.loads(content) if is_json else content

    async def ended(self) -> bool:
        """Whether the other side hangs up, with nothing more to say."""
        async with asyncio.timeout(HANG_S):
            return await self.reader.read() == b""

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@pytest.fixture
async def wire(address: tuple[str, int]) -> AsyncIterator[Wire]:
    """One connection."""
    connection = await Wire.open(address)
    yield connection
    await connection.close()


def request(path: str = RELEASE, body: bytes = BODY, *lines: str, version: str = "1.1") -> bytes:
    """A POST as bytes; a line may replace the length."""
    head = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, *lines, "", ""]).encode() + body


async def test_one_connection_carries_one_request_after_another(wire: Wire) -> None:
    for _ in range(3):
        await wire.send(request())
        assert (await wire.answer())[0] == 404


async def test_requests_sent_at_once_are_answered_in_their_order(wire: Wire) -> None:
    cold = b"GET /v1/leases/some HTTP/1.1\r\nHost: localhost\r\n\r\n"
    hot = [request(f"/v1/leases/number-{n}/release") for n in range(4)]
    await wire.send(b"".join([hot[0], hot[1], cold, hot[2], cold, hot[3]]))
    names = [(await wire.answer())[2]["message"].rpartition(" ")[2] for _ in range(6)]
    assert names == ["number-0", "number-1", "some", "number-2", "some", "number-3"]


async def test_a_request_may_come_in_any_pieces(wire: Wire) -> None:
    whole = request()
    await wire.send(*(whole[n : n + 1] for n in range(len(whole))))
    assert (await wire.answer())[0] == 404


@pytest.mark.parametrize(
    "sent",
    [
        request(RELEASE, b"b\r\n" + BODY + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        request(f"{RELEASE}?x=1"),
        request(RELEASE.replace("nothing", "%6eothing")),
        request(version="1.0"),
    ],
    ids=["chunked", "with a query", "escaped", "of HTTP 1.0"],
)
async def test_an_unusual_request_gets_the_same_answer(wire: Wire, sent: bytes) -> None:
    await wire.send(sent)
    status, _, content = await wire.answer()
    assert (status, content["code"]) == (404, "unknown_resource")
    assert "lease nothing" in content["message"]


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on(wire: Wire) -> None:
    head, body = request(RELEASE, BODY, "Expect: 100-continue").split(b"\r\n\r\n")
    await wire.send(head + b"\r\n\r\n")
    async with asyncio.timeout(HANG_S):
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await wire.send(body)
    assert (await wire.answer())[0] == 404


async def test_the_connection_ends_when_the_client_says_so(wire: Wire) -> None:
    await wire.send(request(RELEASE, BODY, "Connection: close"))
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"]) == (404, "close")
    assert await wire.ended()


async def test_a_body_that_is_too_large_is_refused(wire: Wire) -> None:
    await wire.send(request(RELEASE, b"", "Content-Length: 1000000"))
    status, _, content = await wire.answer()
    assert (status, content["code"]) == (413, "request_too_large")


async def test_what_is_not_http_is_refused_and_the_connection_ends(wire: Wire) -> None:
    await wire.send(b"\x16\x03\x01 hello\r\n\r\n")
    status, headers, _ = await wire.answer()
    assert (status, headers["connection"]) == (400, "close")
    assert await wire.ended()


async def test_a_client_that_leaves_does_not_disturb_others(
    address: tuple[str, int], wire: Wire
) -> None:
    for sent in (request(), request()[:-3], request()[:40]):
        leaver = await Wire.open(address)
        await leaver.send(sent)
        await leaver.close()
    await wire.send(request())
    assert (await wire.answer())[0] == 404


async def test_a_large_report_fits(address: tuple[str, int], service: Service) -> None:
    producer = PaperProducer()
    spaces = b" " * 1_000_000
    report = spaces + producer.report().model_dump_json().encode()
    url = f"http://{address[0]}:{address[1]}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=HANG_S) as client:
        answer = await client.put(
            "/v1/producers/producer", content=report, headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 200
    assert (await service.services.ledger.producer("producer")).producer_id == "producer"


async def test_a_request_under_way_is_answered_before_the_server_ends(service: Service) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        server = Server(service)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        wire = await Wire.open(listener.getsockname())
        await wire.send(request())
        await wire.answer()
        whole = request()
        await wire.send(whole[:-1])
        await async_until(lambda: in_flight(service) == 1)
        server.should_exit = True
        # Set when the shutdown begins, in the same turn of the loop as connections are told.
        await async_until(lambda: service.services.event_watcher.closed)
        await wire.send(whole[-1:])
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (404, "close")
        await serving
        await wire.close()


async def test_many_connections_at_once_each_get_their_own(
    address: tuple[str, int], service: Service
) -> None:
    producer, consumer = PaperProducer(), PaperConsumer()
    ledger = service.services.ledger
    for _ in range(2):
        producer.books_id = (await ledger.report_producer(producer.report())).books_id
    await ledger.report_consumer(consumer.report())
    wish = consumer.request().model_dump_json().encode()

    async def lend(number: int) -> str:
        wire = await Wire.open(address)
        for attempt in range(2):
            await wire.send(request("/v1/leases", wish, f"Idempotency-Key: {number}"))
            status, _, grant = await wire.answer()
            assert status == 201, attempt
        lease_id: str = grant["lease"]["lease_id"]
        body = b'{"epoch":%d}' % grant["lease"]["epoch"]
        await wire.send(request(f"/v1/leases/{lease_id}/release", body))
        status, _, released = await wire.answer()
        assert (status, released["lease_id"], released["state"]) == (200, lease_id, "released")
        await wire.close()
        return lease_id

    lease_ids = await asyncio.gather(*(lend(number) for number in range(8)))
    assert len(set(lease_ids)) == 8
    assert await ledger.audit() == []


async def test_a_token_is_refused_before_the_body_has_come(
    store: EmbeddedValkey, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.json"
    create_token(tokens, roles=[Role.READER])
    service = Service(CoordinatorSettings(tokens_file=tokens), store.url)
    async with ledger_room(store.url), service.running(), serving(service) as address:
        for path in (RELEASE, "/v1/reclaims", "/v1/nothing"):
            wire = await Wire.open(address)
            await wire.send(request(path)[: -len(BODY)])
            status, _, content = await wire.answer()
            assert (status, content["code"]) == (401, "unauthenticated")
            await wire.close()
