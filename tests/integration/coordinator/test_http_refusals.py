"""What the REST interface refuses: statuses, bodies and bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.http.hot_routes import LARGE_BODY_BYTES, MAX_MEMBERS
from aqua_coordinator.http.request_limits import REPORT_BODY_BYTES, SMALL_BODY_BYTES
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol import PROTOCOL_VERSION
from aqua_protocol.members import MAX_RECLAIMS_PER_REPORT, ReclaimReport
from harness.asgi import as_json, client_of, error_of
from harness.ledger_room import ledger_room
from harness.members_on_paper import SLAB, PaperProducer


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/nowhere", "unknown_resource"),
        ("GET", "/v1/leases/", "unknown_resource"),
        ("GET", "/v1/leases%0A", "unknown_resource"),
        ("GET", "/v1/events%0A", "unknown_resource"),
        ("GET", "/v1/quarantine?cursor=%D9%A3-%D9%A3", "request_invalid"),
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


def _large(**bad: object) -> bytes:
    """A large report of a producer that does not fit."""
    report = as_json(PaperProducer().report()) | {"endpoint": "x" * LARGE_BODY_BYTES}
    return json.dumps(report | bad).encode()


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        (_large(), ["endpoint"]),
        (_large(endpoint="e", leases=[{"lease_id": 1}] * 4096), 4),
        (_large(protocol_version=9), "version_mismatch"),
        (_large(leases=[dict.fromkeys(map(str, range(MAX_MEMBERS + 1)))]), None),
        (b"{" + b" " * LARGE_BODY_BYTES, None),
        (b"\xff" * LARGE_BODY_BYTES, None),
        (b"[" * LARGE_BODY_BYTES, None),
        (b"9" * LARGE_BODY_BYTES, None),
    ],
)
async def test_a_large_body_that_does_not_fit_is_refused_at_its_first_faults(
    http: httpx.AsyncClient, body: bytes, faults: list[str] | int | str | None
) -> None:
    assert len(body) >= LARGE_BODY_BYTES
    headers = {"Content-Type": "application/json"}
    error = error_of(await http.put("/v1/producers/producer", content=body, headers=headers))
    if isinstance(faults, str):
        assert error.code == faults
        return
    assert error.code == "request_invalid"
    named = [fault["field"] for fault in error.details.get("faults", [])]
    if isinstance(faults, int):
        assert len(named) == faults
        assert {field.rpartition(".")[0] for field in named} == {"leases.0"}
    else:
        assert named == (faults or [])


async def test_a_large_body_that_fits_is_taken(http: httpx.AsyncClient) -> None:
    producer = PaperProducer()
    report = as_json(producer.report()) | {
        "offered_bytes": 1024 * SLAB,
        "leases": [
            {"lease_id": f"lease-{n}", "epoch": 1, "consumer_id": "c", "held_bytes": SLAB}
            for n in range(1024)
        ],
    }
    body = json.dumps(report).encode()
    assert len(body) >= LARGE_BODY_BYTES
    answer = await http.put("/v1/producers/producer", json=report)
    assert [notice["reason"] for notice in answer.json()["ended"]] == ["unproven"] * 1024


async def test_zeros_in_front_of_a_length_are_none_of_it(http: httpx.AsyncClient) -> None:
    length = {"Content-Type": "application/json", "Content-Length": f"{'0' * 5000}2"}
    answer = await http.put("/v1/producers/producer", content=b"{}", headers=length)
    assert error_of(answer).code == "request_invalid"
    length["Content-Length"] = f"{'0' * 5000}{REPORT_BODY_BYTES + 1}"
    answer = await http.put("/v1/producers/producer", content=b"{}", headers=length)
    assert error_of(answer).code == "request_too_large"


@pytest.mark.parametrize("path", ["producers/producer", "heartbeats"])
async def test_reclaims_count_for_the_rate_of_reports_since_the_books_keep_each(
    store: EmbeddedValkey, tmp_path: Path, path: str
) -> None:
    tokens = tmp_path / "tokens.json"
    one, other = (create_token(tokens, roles=[Role.PRODUCER])[0] for _ in range(2))
    settings = CoordinatorSettings(tokens_file=tokens, max_reports_per_s=1)
    producer = PaperProducer()

    async def report(http: httpx.AsyncClient, reclaim_count: int) -> httpx.Response:
        """The answer to a report that tells of so many reclaims more."""
        reclaims = [
            ReclaimReport(
                reclaim_id=f"reclaim-{producer.revision}-{index}",
                requested_bytes=SLAB,
                returned_bytes=0,
                deadline_s=1.0,
                age_s=0.0,
            )
            for index in range(reclaim_count)
        ]
        body = as_json(producer.report(reclaims=reclaims))
        if path == "heartbeats":
            return await http.post(f"/v1/{path}", json={"producers": [body]})
        return await http.put(f"/v1/{path}", json=body)

    async with (
        ledger_room(store.url),
        Service(settings, store.url).running() as service,
        client_of(service, one) as modest,
        client_of(service, other) as lavish,
    ):
        for _ in range(3):
            assert (await report(modest, 0)).status_code == 200
        assert (await report(lavish, MAX_RECLAIMS_PER_REPORT)).status_code == 200
        assert error_of(await report(lavish, 0)).code == "rate_limited"


async def test_only_operators_may_send_what_only_they_may_write(
    store: EmbeddedValkey, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.json"
    member, _ = create_token(tokens, roles=[Role.CONSUMER, Role.PRODUCER])
    operator, _ = create_token(tokens, roles=[Role.OPERATOR])
    settings = CoordinatorSettings(tokens_file=tokens)
    body = b'{"pairings": []}' + b" " * SMALL_BODY_BYTES
    headers = {"Content-Type": "application/json"}
    async with ledger_room(store.url), Service(settings, store.url).running() as service:
        for token, status in ((member, 413), (operator, 200)):
            async with client_of(service, token) as http:
                answer = await http.put("/v1/placements", content=body, headers=headers)
                assert answer.status_code == status, answer.text


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


FOREIGN_HOSTS = [
    *("rebound.example", "rebound.example:7700", "127.0.0.1.rebound.example", "", "10.0.0.5"),
    *(
        "localhost@rebound.example",
        "localhost/rebound.example",
        "[::1",
        "local host",
        "localhost:x",
    ),
]
CALLS = [
    *(("PUT", "/v1/producers/p"), ("POST", "/v1/heartbeats"), ("POST", "/v1/leases")),
    *(("GET", "/v1/leases"), ("GET", "/metrics"), ("GET", "/healthz"), ("GET", "/docs")),
]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_a_page_whose_name_was_rebound_to_this_machine_gets_no_answer(
    http: httpx.AsyncClient, host: str
) -> None:
    for method, path in CALLS:
        headers = {"Host": host, "Content-Type": "application/json", "Idempotency-Key": "key"}
        content = None if method == "GET" else b"{}"
        answer = await http.request(method, path, content=content, headers=headers)
        assert error_of(answer).code == "misdirected_request", (method, path)


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:7700", "127.0.0.1:80", "127.8.8.8", "[::1]:7700", "[::1]"]
)
async def test_loopback_is_answered_by_every_name(http: httpx.AsyncClient, host: str) -> None:
    for method, path in CALLS:
        headers = {"Host": host, "Content-Type": "application/json", "Idempotency-Key": "key"}
        content = None if method == "GET" else b"{}"
        answer = await http.request(method, path, content=content, headers=headers)
        assert answer.status_code in {200, 422}, (method, path)


@pytest.mark.parametrize("tokens", [True, False])
async def test_names_are_those_that_were_configured(
    store: EmbeddedValkey, tmp_path: Path, *, tokens: bool
) -> None:
    path = tmp_path / "tokens.json"
    create_token(path, roles=[Role.READER])
    settings = CoordinatorSettings.model_validate(
        {"tokens_file": path if tokens else None, "allowed_hosts": "Aqua.internal,aqua"}
    )
    async with client_of(Service(settings, store.url)) as http:
        for host, status in (("aqua.internal:7700", 200), ("aqua", 200), ("other.internal", 421)):
            assert (await http.get("/healthz", headers={"Host": host})).status_code == status


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
