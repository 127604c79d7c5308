"""Hot routes answer exactly as FastAPI does."""

from __future__ import annotations

from typing import Any

import httpx

from aqua_coordinator.app import Service
from aqua_coordinator.http.request_limits import RequestLimits
from harness.asgi import client_of, without_network
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer

HOT_PATHS = {
    "/v1/producers/{producer_id}",
    "/v1/consumers/{consumer_id}",
    "/v1/offers/{producer_id}",
    "/v1/heartbeats",
    "/v1/leases",
    "/v1/leases/{lease_id}/renew",
    "/v1/leases/{lease_id}/release",
}


def test_what_members_do_all_the_time_has_a_hot_route(service: Service) -> None:
    assert {route.path for route in service.hot_routes.values()} == HOT_PATHS


def _conversation() -> list[tuple[str, str, dict[str, Any], dict[str, str]]]:
    """Good and bad requests of every hot operation, in an order that makes the good ones work."""
    producer, consumer = PaperProducer(), PaperConsumer()
    report = producer.report().model_dump(mode="json")
    wish = consumer.request().model_dump(mode="json")
    offer = {"incarnation": "life-1", "revision": 3, "offered_bytes": 8 * SLAB}
    key = {"Idempotency-Key": "key"}
    return [
        ("PUT", "/v1/producers/producer", report, {}),
        ("PUT", "/v1/producers/producer", report | {"revision": -1}, {}),
        ("PUT", "/v1/producers/producer", report | {"protocol_version": 9}, {}),
        ("PUT", "/v1/producers/other", report, {}),
        ("PUT", "/v1/producers/-bad", report, {}),
        ("PUT", "/v1/consumers/consumer", consumer.report().model_dump(mode="json"), {}),
        ("PUT", "/v1/consumers/consumer", {}, {}),
        ("POST", "/v1/heartbeats", {"producers": [report | {"revision": 1}]}, {}),
        ("POST", "/v1/heartbeats", {"producers": 1}, {}),
        ("PUT", "/v1/offers/producer", offer, {}),
        ("PUT", "/v1/offers/producer", offer | {"revision": 0}, {}),
        ("POST", "/v1/leases", wish, key),
        ("POST", "/v1/leases", wish | {"bytes": 0}, key),
        ("POST", "/v1/leases", wish, {}),
        ("POST", "/v1/leases", wish, {"Idempotency-Key": " "}),
        ("POST", "/v1/leases", {}, {}),
        ("POST", "/v1/leases/nothing/renew", {"epoch": 1}, {}),
        ("POST", "/v1/leases/nothing/renew", {"epoch": 0}, {}),
        ("POST", "/v1/leases/nothing/release", {"epoch": 1}, {}),
        ("POST", "/v1/leases/bad%20name/release", {"epoch": 1}, {}),
        ("POST", "/v1/leases/bad%20name/release", {"epoch": 0}, {}),
    ]


CHANGING = {"heartbeat_s", "books_id", "capability_key", "min_epoch", "fault"}


def _plain(content: object) -> object:
    """Without what differs between two answers, and pydantic's words: an array is a list in one."""
    if isinstance(content, dict):
        if content.get("code") == "request_invalid":
            content = content | {"message": ""}
        return {name: _plain(value) for name, value in content.items() if name not in CHANGING}
    if isinstance(content, list):
        return [_plain(value) for value in content]
    return content


async def test_hot_routes_and_the_framework_give_the_same_answers(service: Service) -> None:
    answers = []
    slow = httpx.AsyncClient(
        transport=without_network(RequestLimits(service.api, {}, service.services)),
        base_url="http://127.0.0.1",
    )
    async with client_of(service) as fast, slow:
        for client in (fast, slow):
            given = []
            for method, path, body, headers in _conversation():
                answer = await client.request(method, path, json=body, headers=headers)
                given.append((method, path, answer.status_code, _plain(answer.json())))
            answers.append(given)
            for name in ("producer", "consumer"):
                await client.delete(f"/v1/{name}s/{name}", params={"incarnation": "life-1"})
    for quick, thorough in zip(*answers, strict=True):
        assert quick == thorough
    assert {status for _, _, status, _ in answers[0]} >= {200, 404, 409, 422, 426}
