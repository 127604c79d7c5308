"""A coordinator called without a network, and what members say to it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from aqua_coordinator.app import Service
from aqua_coordinator.http.connections import Connection
from aqua_protocol import ErrorBody
from aqua_protocol.errors import ERRORS_BY_CODE
from aqua_protocol.leases import LeaseGrant
from aqua_protocol.members import ProducerAck
from harness.members_on_paper import PaperConsumer, PaperProducer


def without_network(app: ASGIApp, connection: Connection | None = None) -> httpx.ASGITransport:
    """Call an application in this process, by this connection or by one for each request."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        used = connection or Connection(asyncio.Transport(), strangers={}, active=set())
        try:
            await app({**scope, "state": {"connection": used}}, receive, send)
        finally:
            if connection is None:
                used.leave()

    return httpx.ASGITransport(app=call)


def bare_request() -> Request:
    """A request over a connection of its own, for operations that are called as they are."""
    connection = Connection(asyncio.Transport(), strangers={}, active=set())
    return Request({"type": "http", "state": {"connection": connection}})


def client_of(
    service: Service, token: str | None = None, connection: Connection | None = None
) -> httpx.AsyncClient:
    """A client of the whole coordinator; close it, or use it as a context manager."""
    return httpx.AsyncClient(
        transport=without_network(service.asgi, connection),
        base_url="http://127.0.0.1",
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
    )


def as_json(body: BaseModel) -> dict[str, Any]:
    """What a member sends."""
    content: dict[str, Any] = body.model_dump(mode="json")
    return content


async def join(http: httpx.AsyncClient, producer: PaperProducer) -> ProducerAck:
    """Report until the producer may be granted from."""
    for _ in range(2):
        answer = await http.put(f"/v1/producers/{producer.name}", json=as_json(producer.report()))
        assert answer.status_code == 200, answer.text
        ack = ProducerAck.model_validate_json(answer.content)
        producer.books_id = ack.books_id
    assert ack.grantable
    return ack


async def hear(http: httpx.AsyncClient, consumer: PaperConsumer) -> None:
    """Report the consumer."""
    answer = await http.put(f"/v1/consumers/{consumer.name}", json=as_json(consumer.report()))
    assert answer.status_code == 200, answer.text


async def allocate(http: httpx.AsyncClient, consumer: PaperConsumer, key: str) -> LeaseGrant:
    """Ask for a slab."""
    answer = await http.post(
        "/v1/leases", json=as_json(consumer.request()), headers={"Idempotency-Key": key}
    )
    assert answer.status_code == 201, answer.text
    return LeaseGrant.model_validate_json(answer.content)


def error_of(answer: httpx.Response) -> ErrorBody:
    """The body of a refusal, whose status must be that of its type."""
    body = ErrorBody.model_validate_json(answer.content)
    assert ERRORS_BY_CODE[body.code].http_status == answer.status_code
    assert body.message
    return body
