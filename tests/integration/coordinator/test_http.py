"""The REST interface: statuses, bodies, bounds, and who may do what."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.request_limits import SMALL_BODY_BYTES
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.tokens import Role, create_token, revoke_token
from aqua_protocol import PROTOCOL_VERSION, ErrorBody
from aqua_protocol.capability import verify
from aqua_protocol.errors import ERRORS_BY_CODE
from aqua_protocol.leases import LeaseGrant
from aqua_protocol.members import HeartbeatAck, ProducerAck
from harness.asgi import client_of
from harness.bounds import stopwatch
from harness.ledger_room import ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer


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


# --- The whole way -----------------------------------------------------------------------


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
    assert unknown.json() == {"profiles": []}
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


# --- Refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/nowhere", "unknown_resource"),
        ("GET", "/v1/leases/", "unknown_resource"),
        ("GET", "/v1/leases/unknown", "unknown_resource"),
        ("GET", "/v1/reclaims/unknown", "unknown_resource"),
        ("PATCH", "/v1/leases", "method_not_allowed"),
        ("DELETE", "/v1/leases/lease-1/renew", "method_not_allowed"),
        ("GET", "/v1/producers/-bad-", "request_invalid"),
        ("GET", "/v1/leases?limit=0", "request_invalid"),
        ("GET", "/v1/leases?limit=1000000", "request_invalid"),
        ("GET", "/v1/leases?cursor=-1", "request_invalid"),
        ("GET", "/v1/leases?cursor=producer@soon", "request_invalid"),
        ("GET", "/v1/reclaims?cursor=-1", "request_invalid"),
        ("GET", "/v1/leases?state=happy", "request_invalid"),
        ("DELETE", "/v1/producers/producer", "request_invalid"),
        ("DELETE", "/v1/consumers/nobody?incarnation=life-1", "unknown_resource"),
    ],
)
async def test_what_cannot_be_found_or_done_is_a_typed_error(
    http: httpx.AsyncClient, method: str, path: str, code: str
) -> None:
    assert error_of(await http.request(method, path)).code == code


async def test_a_wrong_method_names_the_right_ones(http: httpx.AsyncClient) -> None:
    for path, methods in {
        "placements": "GET, PUT",
        "leases": "GET, POST",
        "leases/some": "GET",
        "leases/some/renew": "POST",
        "producers/some": "DELETE, GET, PUT",
    }.items():
        answer = await http.patch(f"/v1/{path}", json={})
        assert error_of(answer).code == "method_not_allowed"
        assert answer.headers["allow"] == methods


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/reclaims"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "request_invalid"),
        (b"{", "request_invalid"),
        (b"[]", "request_invalid"),
        (b'{"bytes": -1}', "request_invalid"),
        (b"\xff\xfe", "request_invalid"),
        (b"[" * 10_000, "request_invalid"),
        (b" " * (SMALL_BODY_BYTES + 1), "request_too_large"),
    ],
)
async def test_a_body_that_is_none_is_refused_the_same_on_both_ways(
    http: httpx.AsyncClient, path: str, body: bytes, code: str
) -> None:
    headers = {"Content-Type": "application/json", "Idempotency-Key": "key"}
    assert error_of(await http.post(path, content=body, headers=headers)).code == code


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/reclaims"])
async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(
    http: httpx.AsyncClient, path: str
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 4096

    headers = {"Content-Type": "application/json", "Idempotency-Key": "key"}
    answer = await http.post(path, content=endless(), headers=headers)
    assert error_of(answer).code == "request_too_large"


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/reclaims"])
async def test_a_body_that_a_browser_may_send_unasked_is_refused(
    http: httpx.AsyncClient, path: str
) -> None:
    headers = {"Content-Type": "text/plain", "Idempotency-Key": "key"}
    assert error_of(await http.post(path, content=b"{}", headers=headers)).code == "request_invalid"


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 0},
        {"bytes": -SLAB},
        {"bytes": 1 << 60},
        {"bytes": 1.5},
        {"bytes": "65536"},
        {"bytes": True},
        {"min_bytes": 2 * SLAB},
        {"min_bytes": 0},
        {"ttl_s": 0},
        {"ttl_s": 1e9},
        {"consumer_id": ""},
        {"consumer_id": "a b"},
        {"consumer_id": "x" * 129},
        {"surprise": 1},
    ],
)
async def test_nonsense_in_a_lease_request_is_refused_with_its_field(
    http: httpx.AsyncClient, change: dict[str, object]
) -> None:
    body = {"consumer_id": "consumer", "bytes": SLAB} | change
    answer = await http.post("/v1/leases", json=body, headers={"Idempotency-Key": "key"})
    error = error_of(answer)
    assert error.code == "request_invalid"
    assert error.details["faults"]


@pytest.mark.parametrize("key", [None, "", " ", "x" * 129, "a b"])
async def test_a_grant_needs_an_idempotency_key(http: httpx.AsyncClient, key: str | None) -> None:
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"consumer_id": "consumer", "bytes": SLAB}
    answer = await http.post("/v1/leases", json=body, headers=headers)
    assert error_of(answer).code == "request_invalid"


async def test_another_protocol_version_is_told_so_even_if_its_report_looks_strange(
    http: httpx.AsyncClient,
) -> None:
    report = as_json(PaperProducer().report(protocol_version=PROTOCOL_VERSION + 1))
    answer = await http.put("/v1/producers/producer", json=report)
    assert error_of(answer).code == "version_mismatch"
    report["a_field_of_the_future"] = 1
    answer = await http.put("/v1/producers/producer", json=report)
    error = error_of(answer)
    assert (error.code, error.details["theirs"]) == ("version_mismatch", PROTOCOL_VERSION + 1)


async def test_path_and_body_must_name_the_same_member(http: httpx.AsyncClient) -> None:
    answer = await http.put("/v1/producers/other", json=as_json(PaperProducer().report()))
    assert error_of(answer).code == "request_invalid"


async def test_more_requests_at_once_than_allowed_are_told_to_retry(
    store: EmbeddedValkey,
) -> None:
    settings = CoordinatorSettings(max_concurrent_requests=4)
    async with (
        ledger_room(store.url),
        Service(settings, store.url).running() as service,
        client_of(service) as http,
    ):
        answers = await asyncio.gather(*(http.get("/readyz") for _ in range(32)))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert 0 < len(refused) < 32
    assert error_of(refused[0]).code == "service_unavailable"
    assert refused[0].headers["retry-after"] == "1"


# --- Tokens ------------------------------------------------------------------------------


@pytest.fixture
async def guarded(store: EmbeddedValkey, tmp_path: Path) -> AsyncIterator[Service]:
    """A coordinator that wants tokens."""
    path = tmp_path / "tokens.json"
    create_token(path, roles=[Role.READER])
    service = Service(CoordinatorSettings(tokens_file=path), store.url)
    async with ledger_room(store.url), service.running():
        yield service


def token_for(
    service: Service, *roles: Role, member: str | None = None, expires_in_s: float | None = None
) -> str:
    """A fresh token that the coordinator knows already."""
    path = service.services.settings.tokens_file
    assert path is not None
    token, _ = create_token(path, roles=list(roles), member=member, expires_in_s=expires_in_s)
    service.services.authenticator.refresh()
    return token


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", "Basic abc", "Bearer aqua_0123456789ab_secret"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_without_a_good_token_nothing_under_v1_is_answered(
    guarded: Service, header: str | None, method: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with client_of(guarded) as http:
        answer = await http.request(method, "/v1/leases", headers=headers)
        assert error_of(answer).code == "unauthenticated"
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200


ROLE_CASES = [
    ("PUT", "/v1/producers/producer", Role.PRODUCER, lambda: as_json(PaperProducer().report())),
    ("PUT", "/v1/consumers/consumer", Role.CONSUMER, lambda: as_json(PaperConsumer().report())),
    ("POST", "/v1/leases", Role.CONSUMER, lambda: as_json(PaperConsumer().request())),
    ("POST", "/v1/leases/lease-1/renew", Role.CONSUMER, lambda: {"epoch": 1}),
    ("POST", "/v1/leases/lease-1/release", Role.CONSUMER, lambda: {"epoch": 1}),
    ("POST", "/v1/leases/lease-1/revoke", Role.OPERATOR, lambda: {"epoch": 1}),
    ("POST", "/v1/reclaims", Role.OPERATOR, lambda: {"producer_id": "producer", "bytes": SLAB}),
    ("PUT", "/v1/placements", Role.OPERATOR, lambda: {"pairings": []}),
    ("PUT", "/v1/profiles", Role.OPERATOR, lambda: {"model": "m", "label": "neutral"}),
    ("GET", "/v1/profiles", None, lambda: None),
    ("DELETE", "/v1/producers/producer?incarnation=life-1", Role.PRODUCER, lambda: None),
    ("DELETE", "/v1/consumers/consumer?incarnation=life-1", Role.CONSUMER, lambda: None),
    ("GET", "/v1/leases", None, lambda: None),
    ("GET", "/v1/producers", None, lambda: None),
]


@pytest.mark.parametrize(("method", "path", "needed", "body"), ROLE_CASES)
async def test_each_operation_wants_its_role(
    guarded: Service, method: str, path: str, needed: Role | None, body: Callable[[], object]
) -> None:
    for role in Role:
        async with client_of(guarded, token_for(guarded, role)) as http:
            answer = await http.request(
                method, path, json=body(), headers={"Idempotency-Key": f"key-{role}"}
            )
        allowed = needed is None or role in {needed, Role.OPERATOR}
        assert (answer.status_code != 403) == allowed, (role, answer.text)


async def test_a_bound_token_speaks_for_its_member_only(guarded: Service) -> None:
    token = token_for(guarded, Role.PRODUCER, Role.CONSUMER, member="mine")
    async with client_of(guarded, token) as http:
        mine, other = PaperProducer(name="mine"), PaperProducer(name="other")
        accepted = await http.put("/v1/producers/mine", json=as_json(mine.report()))
        assert accepted.status_code == 200
        refused = await http.put("/v1/producers/other", json=as_json(other.report()))
        assert error_of(refused).code == "forbidden"
        many = await http.post(
            "/v1/heartbeats",
            json={"producers": [as_json(mine.report()), as_json(other.report())]},
        )
        ack = HeartbeatAck.model_validate_json(many.content)
        assert [type(entry).__name__ for entry in ack.producers] == ["ProducerAck", "ErrorBody"]


async def test_a_bound_consumer_cannot_release_the_lease_of_another(guarded: Service) -> None:
    async with client_of(guarded, token_for(guarded, Role.OPERATOR)) as http:
        await join(http, PaperProducer())
        await hear(http, PaperConsumer())
        lease = (await allocate(http, PaperConsumer(), "key")).lease
    thief = token_for(guarded, Role.CONSUMER, member="thief")
    async with client_of(guarded, thief) as http:
        for action in ("release", "renew"):
            answer = await http.post(
                f"/v1/leases/{lease.lease_id}/{action}", json={"epoch": lease.epoch}
            )
            assert error_of(answer).code == "forbidden"


async def test_revoked_and_expired_tokens_stop_working(guarded: Service) -> None:
    path = guarded.services.settings.tokens_file
    assert path is not None
    token = token_for(guarded, Role.READER)
    async with client_of(guarded, token) as http:
        assert (await http.get("/v1/leases")).status_code == 200
        revoke_token(path, token.split("_")[1])
        guarded.services.authenticator.refresh()
        assert error_of(await http.get("/v1/leases")).code == "unauthenticated"
    async with client_of(guarded, token_for(guarded, Role.READER, expires_in_s=0.0)) as http:
        error = error_of(await http.get("/v1/leases"))
        assert "expired" in error.message


def sample(text: str, name: str, labels: dict[str, str]) -> float | None:
    """A value of the exposition, or None."""
    for family in text_string_to_metric_families(text):
        for entry in family.samples:
            if entry.name == name and entry.labels == labels:
                return float(entry.value)
    return None


# --- Health, metrics, events -------------------------------------------------------------


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


async def test_metrics_can_be_guarded(store: EmbeddedValkey, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token, _ = create_token(path, roles=[Role.READER])
    settings = CoordinatorSettings(tokens_file=path, metrics_need_token=True)
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
