"""The REST interface: operations, health and metrics."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol.capability import verify
from aqua_protocol.errors import StoreUnavailableError
from aqua_protocol.members import HeartbeatAck
from harness.asgi import allocate, as_json, client_of, error_of, hear, join
from harness.bounds import stopwatch
from harness.ledger_room import ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer


async def test_a_lease_from_first_report_to_last_slab(http: httpx.AsyncClient) -> None:
    producer, consumer = PaperProducer(), PaperConsumer()
    ack = await join(http, producer)
    await hear(http, consumer)
    grant = await allocate(http, consumer, "key")
    claims = verify(
        grant.token,
        base64.b64decode(ack.capability_key),
        producer_id="producer",
        now_s=time.time(),
        min_epoch=ack.min_epoch,
    )
    assert (claims.lease_id, claims.bytes) == (grant.lease.lease_id, SLAB)
    producer.hand_out(grant.lease)
    await http.put("/v1/producers/producer", json=as_json(producer.report()))
    lease_url = f"/v1/leases/{grant.lease.lease_id}"
    epoch = {"epoch": grant.lease.epoch}
    assert (await http.get(lease_url)).json()["state"] == "active"
    passed_s = stopwatch()
    renewed = (await http.post(f"{lease_url}/renew", json=epoch)).json()
    assert renewed["expires_in_s"] > 29.9 - passed_s()
    assert (await http.post(f"{lease_url}/release", json=epoch)).json()["state"] == "fenced"
    busy = await http.delete("/v1/producers/producer", params={"incarnation": "life-1"})
    assert error_of(busy).code == "invalid_transition"
    producer.take_back(grant.lease)
    await http.put("/v1/producers/producer", json=as_json(producer.report()))
    assert (await http.get(lease_url)).json()["state"] == "released"
    for path in ("producers/producer", "consumers/consumer"):
        gone = await http.delete(f"/v1/{path}", params={"incarnation": "life-1"})
        assert gone.status_code == 204
        assert gone.content == b""


async def test_a_profile_replaces_the_one_before_and_is_read_by_model(
    http: httpx.AsyncClient,
) -> None:
    first = {"model": "org/sd", "label": "producer", "spare_bytes": 5}
    second = first | {"spare_bytes": 7, "peak_batch": 8}
    for profile in (first, second, {"model": "other", "label": "neutral"}):
        assert (await http.put("/v1/profiles", json=profile)).status_code == 200
    (kept,) = (await http.get("/v1/profiles", params={"model": "org/sd"})).json()["profiles"]
    assert (kept["spare_bytes"], kept["peak_batch"]) == (7, 8)
    everything = (await http.get("/v1/profiles")).json()["profiles"]
    assert [profile["model"] for profile in everything] == ["org/sd", "other"]
    unknown = await http.get("/v1/profiles", params={"model": "nobody"})
    assert unknown.json()["profiles"] == []
    wrong = await http.put("/v1/profiles", json={"model": "x", "label": "producer"})
    assert error_of(wrong).code == "request_invalid"


async def test_every_listing_answers(http: httpx.AsyncClient) -> None:
    producer, consumer = PaperProducer(), PaperConsumer()
    await join(http, producer)
    await hear(http, consumer)
    grant = await allocate(http, consumer, "key")
    order = await http.post(
        "/v1/reclaims",
        json={"producer_id": "producer", "bytes": SLAB},
        headers={"Idempotency-Key": "key"},
    )
    assert order.status_code == 201
    plan = {
        "plan_hash": "p",
        "pairings": [{"consumer_id": "consumer", "producers": ["producer"], "reason": "near"}],
    }
    assert (await http.put("/v1/placements", json=plan)).json() == plan
    assert (await http.get("/v1/placements")).json() == plan
    producers = (await http.get("/v1/producers")).json()["producers"]
    assert producers == [(await http.get("/v1/producers/producer")).json() | producers[0]]
    offers = (await http.get("/v1/offers")).json()["offers"]
    assert offers[0]["free_bytes"] + offers[0]["leased_bytes"] == offers[0]["offered_bytes"]
    consumers = (await http.get("/v1/consumers")).json()["consumers"]
    assert consumers[0]["leased_bytes"] == SLAB
    leases = (await http.get("/v1/leases", params={"state": "granted"})).json()
    assert [lease["lease_id"] for lease in leases["leases"]] == [grant.lease.lease_id]
    assert leases["next_cursor"] is None
    reclaim_id = order.json()["reclaim_id"]
    reclaims = (await http.get("/v1/reclaims")).json()["reclaims"]
    assert [reclaim["reclaim_id"] for reclaim in reclaims] == [reclaim_id]
    assert (await http.get(f"/v1/reclaims/{reclaim_id}")).json()["origin"] == "operator"


async def test_a_heartbeat_carries_many_members_and_a_bad_one_spoils_no_other(
    http: httpx.AsyncClient,
) -> None:
    producers = [PaperProducer(name=f"p{number}") for number in range(3)]
    bad = as_json(producers[1].report(revision=0))
    await http.put("/v1/producers/p1", json=as_json(producers[1].report(revision=5)))
    body = {
        "producers": [as_json(producers[0].report()), bad, as_json(producers[2].report())],
        "consumers": [as_json(PaperConsumer().report())],
    }
    answer = await http.post("/v1/heartbeats", json=body)
    assert answer.status_code == 200
    ack = HeartbeatAck.model_validate_json(answer.content)
    kinds = [type(entry).__name__ for entry in ack.producers]
    assert kinds == ["ProducerAck", "ErrorBody", "ProducerAck"]
    assert ack.producers[1].code == "stale_revision"  # type: ignore[union-attr] # see `kinds`
    assert len(ack.consumers) == 1


def break_steps(
    monkeypatch: pytest.MonkeyPatch, service: Service, steps: Sequence[str], error: Exception
) -> AsyncMock:
    """Have steps of the books fail; what counts their calls."""
    broken = AsyncMock(side_effect=error)
    for step in steps:
        monkeypatch.setattr(service.services.ledger, step, broken)
    return broken


async def test_a_heartbeat_without_a_store_fails_as_a_whole(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("report_producer", "report_consumer")
    absent = break_steps(monkeypatch, service, steps, StoreUnavailableError("absent"))
    body = {
        "producers": [as_json(PaperProducer().report())],
        "consumers": [as_json(PaperConsumer().report())],
    }
    assert error_of(await http.post("/v1/heartbeats", json=body)).code == "store_unavailable"
    assert absent.await_count == 2


def sample(text: str, name: str, labels: dict[str, str]) -> float | None:
    """A value of the exposition, or None."""
    for family in text_string_to_metric_families(text):
        for entry in family.samples:
            if entry.name == name and entry.labels == labels:
                return float(entry.value)
    return None


async def test_health_says_who_is_there(http: httpx.AsyncClient) -> None:
    alive, ready = (await http.get("/healthz")).json(), (await http.get("/readyz")).json()
    assert (alive["status"], ready["status"]) == ("ok", "ready")
    assert ready["books_id"].startswith("books-")


async def test_metrics_show_the_books_and_the_requests(http: httpx.AsyncClient) -> None:
    producer, consumer = PaperProducer(), PaperConsumer()
    await join(http, producer)
    await hear(http, consumer)
    grant = await allocate(http, consumer, "key")
    producer.hand_out(grant.lease)
    await http.put("/v1/producers/producer", json=as_json(producer.report()))
    await http.get("/nowhere")
    text = (await http.get("/metrics")).text
    where = {"producer": "producer", "node": "node-0", "gpu_uuid": "GPU-producer", "model": ""}
    requests = "aqua_coordinator_requests_total"
    granted = {"route": "/v1/leases", "method": "POST", "code": "201"}
    lost = {"route": "unmatched", "method": "GET", "code": "404"}
    assert sample(text, "aqua_producer_offered_bytes", where) == 16 * SLAB
    assert sample(text, "aqua_producer_leased_bytes", where) == SLAB
    assert sample(text, "aqua_leases", {"state": "active"}) == 1
    assert sample(text, "aqua_leases", {"state": "granted"}) == 0
    assert sample(text, "aqua_lease_attach_duration_seconds_count", {}) == 1
    assert sample(text, "aqua_redis_up", {}) == 1
    assert sample(text, requests, granted) == 1
    assert sample(text, requests, lost) == 1
    scripts = "aqua_redis_command_duration_seconds"
    assert sample(text, f"{scripts}_count", {"command": "grant_lease"}) == 1
    assert sample(text, f"{scripts}_bucket", {"command": "grant_lease", "le": "+Inf"}) == 1
    assert grant.lease.lease_id not in text


@pytest.mark.slow
async def test_a_mistake_of_ours_is_answered_and_counted_on_both_ways(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_steps(monkeypatch, service, ("reclaims", "report_producer"), AssertionError("a mistake"))
    answers = [
        await http.get("/v1/reclaims"),
        await http.put("/v1/producers/producer", json=as_json(PaperProducer().report())),
    ]
    assert [error_of(answer).code for answer in answers] == ["aqua_error"] * 2
    text = (await http.get("/metrics")).text
    for route, method in (("/v1/reclaims", "GET"), ("/v1/producers/{producer_id}", "PUT")):
        labels = {"route": route, "method": method, "code": "500"}
        assert sample(text, "aqua_coordinator_requests_total", labels) == 1


@pytest.mark.parametrize(("host", "needs"), [("127.0.0.1", True), ("10.0.0.5", None)])
async def test_metrics_want_a_token_when_told_so_and_when_others_may_come(
    store: EmbeddedValkey, tmp_path: Path, host: str, *, needs: bool | None
) -> None:
    path = tmp_path / "tokens.json"
    token, _ = create_token(path, roles=[Role.READER])
    settings = CoordinatorSettings(tokens_file=path, listen_host=host, metrics_need_token=needs)
    async with ledger_room(store.url), Service(settings, store.url).running() as service:
        async with client_of(service) as http:
            assert error_of(await http.get("/metrics")).code == "unauthenticated"
        async with client_of(service, token) as http:
            assert (await http.get("/metrics")).status_code == 200


async def test_many_metrics_labels_cannot_be_made_by_asking_for_odd_paths(
    http: httpx.AsyncClient,
) -> None:
    for number in range(50):
        await http.get(f"/nowhere/{number}")
    text = (await http.get("/metrics")).text
    assert text.count('route="unmatched"') < 25


async def test_the_document_is_rendered_once(
    service: Service, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await http.get("/openapi.json")
    assert first.json() == service.api.openapi()
    monkeypatch.setattr(service.api, "openapi", None)
    assert (await http.get("/openapi.json")).content == first.content
