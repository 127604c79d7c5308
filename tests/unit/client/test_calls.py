"""Every call is one that the coordinator's OpenAPI document describes, and none is missing."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from typing import Any, Final

import pytest

from aqua_client import AsyncCoordinatorClient, Call, CoordinatorClient, Listing, calls
from aqua_client.client import Operations
from aqua_coordinator.app import Service
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol import LeaseState, TransportKind
from aqua_protocol.leases import LeaseRenewal, LeaseRequest, Pairing, PlacementPlan, ReclaimRequest
from aqua_protocol.members import ConsumerReport, Heartbeat, OfferUpdate, ProducerReport
from aqua_protocol.profile import ModelProfile, ProfileLabel

STAMP: Final[dict[str, Any]] = {
    "incarnation": "life",
    "revision": 0,
    "protocol_version": 1,
    "aqualib_version": "0.1.0",
    "node": "node",
    "domain": "domain",
    "gpu_uuid": "GPU-0",
    "pid": 1,
}
PRODUCER: Final = ProducerReport(
    **STAMP,
    producer_id="p",
    endpoint="/run/aqua/p.sock",
    transport=TransportKind.MEMFD,
    slab_bytes=65536,
    offered_bytes=65536,
)
CONSUMER: Final = ConsumerReport(**STAMP, consumer_id="c")
PROFILE: Final = ModelProfile.model_validate(
    {
        "model": "llama",
        "label": ProfileLabel.CONSUMER,
        "needed_bytes": 1,
        "hbm_bytes": 80,
        "measured": "more",
    }
)

EXAMPLES: Final[dict[str, Call[Any] | Listing[Any, Any]]] = {
    "report_producer": calls.report_producer(PRODUCER),
    "report_consumer": calls.report_consumer(CONSUMER),
    "heartbeat": calls.heartbeat(Heartbeat(producers=[PRODUCER], consumers=[CONSUMER])),
    "remove_producer": calls.remove_producer("p", "life"),
    "remove_consumer": calls.remove_consumer("c", "life"),
    "get_producer": calls.get_producer("p"),
    "get_consumer": calls.get_consumer("c"),
    "list_producers": calls.list_producers(),
    "list_consumers": calls.list_consumers(),
    "list_offers": calls.list_offers(),
    "list_quotas": calls.list_quotas(),
    "update_offer": calls.update_offer(
        "p", OfferUpdate(incarnation="life", revision=1, offered_bytes=0)
    ),
    "grant_lease": calls.grant_lease(LeaseRequest(consumer_id="c", bytes=1)),
    "renew_lease": calls.renew_lease("l", LeaseRenewal(epoch=1, ttl_s=9.0)),
    "release_lease": calls.release_lease("l", 1),
    "revoke_lease": calls.revoke_lease("l", 1),
    "get_lease": calls.get_lease("l"),
    "list_leases": calls.list_leases(state=LeaseState.GRANTED, producer_id="p", consumer_id="c"),
    "open_reclaim": calls.open_reclaim(ReclaimRequest(producer_id="p", bytes=1)),
    "get_reclaim": calls.get_reclaim("r"),
    "list_reclaims": calls.list_reclaims(),
    "list_quarantine": calls.list_quarantine(),
    "put_placements": calls.put_placements(
        PlacementPlan(pairings=[Pairing(consumer_id="c", producers=["p"])])
    ),
    "get_placements": calls.get_placements(cursor="c", limit=1),
    "put_profile": calls.put_profile(PROFILE),
    "get_profiles": calls.get_profiles("llama"),
    "healthz": calls.healthz(),
    "readyz": calls.readyz(),
}
NOT_CALLS: Final = {"metrics", "stream_events", "timeline"}
"""Text for Prometheus, and what the console reads."""
WHOLE_OR_PAGED: Final = {"get_placements", "get_profiles"}
"""What fits on a page as a rule, and is a call that gives one."""


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of a coordinator that is not started."""
    settings = CoordinatorSettings()
    return Service(settings, "redis://127.0.0.1:1").api.openapi()


def operations() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Path, verb and description of each operation, by the name of its function."""
    found = {}
    for path, verbs in document()["paths"].items():
        for verb, described in verbs.items():
            suffix = re.sub(r"\W", "_", path) + f"_{verb}"
            name = described["operationId"].removesuffix(suffix)
            found[name] = (path, verb.upper(), described)
    return found


def call_of(name: str) -> Call[Any]:
    example = EXAMPLES[name]
    return example.first if isinstance(example, Listing) else example


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        component = schema["$ref"].rpartition("/")[2]
        found: dict[str, Any] = document()["components"]["schemas"][component]
        return found
    return schema


def test_each_operation_of_the_document_is_a_call_and_each_call_an_operation() -> None:
    assert set(EXAMPLES) == set(operations()) - NOT_CALLS
    declared = {
        name
        for name, value in vars(calls).items()
        if inspect.isfunction(value) and value.__module__ == calls.__name__ and name[0] != "_"
    }
    assert declared == set(EXAMPLES)


def test_both_clients_have_every_operation() -> None:
    assert {name for name in vars(Operations) if name[0] != "_"} == set(EXAMPLES)
    for client in (CoordinatorClient, AsyncCoordinatorClient):
        for name in EXAMPLES:
            assert getattr(client, name).build is getattr(calls, name)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_path_and_verb_are_those_of_the_document(name: str) -> None:
    path, verb, _ = operations()[name]
    call = call_of(name)
    assert call.method == verb
    assert re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), call.path)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_parameters_and_headers_are_those_of_the_document(name: str) -> None:
    call = call_of(name)
    described = operations()[name][2].get("parameters", [])
    known = {entry["name"]: entry for entry in described if entry["in"] == "query"}
    assert set(call.params) <= set(known)
    assert {key for key, entry in known.items() if entry["required"]} <= set(call.params)
    is_listing = "cursor" in known and name not in WHOLE_OR_PAGED
    assert isinstance(EXAMPLES[name], Listing) == is_listing
    wants_key = any(entry["name"] == "Idempotency-Key" for entry in described)
    assert (call.idempotency_key is not None) == wants_key


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_body_is_the_one_of_the_document(name: str) -> None:
    call = call_of(name)
    body = operations()[name][2].get("requestBody")
    assert (call.body is not None) == (body is not None)
    if body is None or call.body is None:
        return
    schema = resolved(body["content"]["application/json"]["schema"])
    sent = set(json.loads(call.body))
    assert sent <= set(schema["properties"])
    assert set(schema.get("required", [])) <= sent


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_answer_is_read_as_the_document_describes_it(name: str) -> None:
    described = operations()[name][2]["responses"]
    (status,) = [status for status in described if status.startswith("2")]
    content = described[status].get("content")
    call = call_of(name)
    if content is None:
        assert call.read(b"") is None
        return
    title = resolved(content["application/json"]["schema"])["title"]
    reader = getattr(getattr(call.read, "func", None), "__self__", None)
    assert title == ("Profiles" if reader is None else reader.__name__)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("readyz", {"status": "ok", "version": "0.2.0"}),
        (
            "grant_lease",
            {
                "lease": {
                    "lease_id": "lease",
                    "epoch": 1,
                    "state": "granted",
                    "producer_id": "p",
                    "consumer_id": "c",
                    "bytes": 1,
                    "expires_in_s": 30.0,
                },
                "token": "token",
                "endpoint": "/run/aqua/p.sock",
                "transport": "memfd",
                "slab_bytes": 65536,
            },
        ),
        (
            "heartbeat",
            {
                "producers": [{"code": "stale_report", "message": "an older one"}],
                "consumers": [{"books_id": "books", "heartbeat_s": 1.0, "available_bytes": 0}],
            },
        ),
        ("get_profiles", {"profiles": []}),
    ],
)
def test_what_a_later_coordinator_says_beyond_the_model_is_ignored_at_any_depth(
    name: str, answer: dict[str, Any]
) -> None:
    read = call_of(name).read
    assert read(json.dumps(_later(answer)).encode()) == read(json.dumps(answer).encode())


def _later(content: Any) -> Any:  # noqa: ANN401 - any JSON
    """The same, said with a field more in every object."""
    if isinstance(content, list):
        return [_later(part) for part in content]
    if not isinstance(content, dict):
        return content
    return {key: _later(part) for key, part in content.items()} | {"of_a_later_version": [1]}


def test_only_calls_that_do_no_harm_are_repeatable() -> None:
    once = {name for name in EXAMPLES if not call_of(name).repeatable}
    assert once == {
        "report_producer",
        "report_consumer",
        "heartbeat",
        "remove_producer",
        "remove_consumer",
        "update_offer",
        "revoke_lease",
    }


def test_what_the_next_report_says_better_goes_elsewhere_at_once_only() -> None:
    moved = {name for name in EXAMPLES if call_of(name).elsewhere}
    assert moved == {
        "report_producer",
        "report_consumer",
        "heartbeat",
        "remove_producer",
        "remove_consumer",
        "update_offer",
    }


def test_a_pushed_profile_leaves_the_measurements_behind() -> None:
    body = calls.put_profile(PROFILE).body
    assert body is not None
    assert "measured" not in json.loads(body)
