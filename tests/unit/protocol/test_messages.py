"""Nothing that merely looks like a value passes as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from aqua_protocol.channel import CONSUMER_MESSAGES, PRODUCER_MESSAGES
from aqua_protocol.leases import LeaseRequest, PlacementPlan, ReclaimRequest
from aqua_protocol.members import ConsumerReport, OfferUpdate, ProducerReport

IDENTITY: dict[str, Any] = {
    "incarnation": "life-1",
    "revision": 3,
    "protocol_version": 1,
    "aqualib_version": "0.1.0",
    "node": "node-1",
    "domain": "rack-1",
    "gpu_uuid": "GPU-0",
    "pid": 7,
}
PRODUCER: dict[str, Any] = IDENTITY | {
    "producer_id": "p",
    "endpoint": "/run/aqua/p.sock",
    "transport": "memfd",
    "slab_bytes": 65536,
    "offered_bytes": 131072,
    "leases": [{"lease_id": "l", "epoch": 9, "consumer_id": "c", "held_bytes": 65536}],
    "reclaims": [
        {
            "reclaim_id": "r",
            "requested_bytes": 65536,
            "returned_bytes": 0,
            "deadline_s": 5.0,
            "age_s": 0.5,
            "first_slab_ms": 1.5,
        }
    ],
    "load": {"queue_length": 0, "memory_used_bytes": 1, "memory_total_bytes": 2},
}
CONSUMER: dict[str, Any] = IDENTITY | {
    "consumer_id": "c",
    "leases": [{"lease_id": "l", "epoch": 9, "mapped_bytes": 65536, "link_bytes_per_s": 1e9}],
}
REQUEST: dict[str, Any] = {"consumer_id": "c", "bytes": 65536, "min_bytes": 1, "ttl_s": 5.5}
GOOD: list[tuple[type, dict[str, Any]]] = [
    (ProducerReport, PRODUCER),
    (ConsumerReport, CONSUMER),
    (LeaseRequest, REQUEST),
    (ReclaimRequest, {"producer_id": "p", "bytes": 1, "deadline_s": 0.5}),
    (OfferUpdate, {"incarnation": "life-1", "revision": 0, "offered_bytes": 0}),
    (PlacementPlan, {"pairings": [{"consumer_id": "c", "producers": ["p", "q"]}]}),
]


def numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401 - JSON
    """Where there are numbers in a JSON document."""
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in numbers(v, (*path, k))]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in numbers(v, (*path, i))]
    return [path] if isinstance(value, int | float) else []


def replaced(document: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(document))
    place: Any = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copy


@pytest.mark.parametrize(("kind", "document"), GOOD)
class TestEveryRequest:
    def test_a_good_one_is_accepted(self, kind: type, document: dict[str, Any]) -> None:
        TypeAdapter(kind).validate_json(json.dumps(document))

    def test_no_number_can_be_replaced_by_something_that_looks_like_one(
        self, kind: type, document: dict[str, Any]
    ) -> None:
        for path in numbers(document):
            fakes: list[Any] = [True, False, "1", "", None, -1, 1e300, [1], {}]
            for fake in fakes:
                if fake is None and path[-1] in {"min_bytes", "first_slab_ms", "link_bytes_per_s"}:
                    continue
                with pytest.raises(ValidationError):
                    TypeAdapter(kind).validate_json(json.dumps(replaced(document, path, fake)))

    def test_infinity_and_nan_are_refused(self, kind: type, document: dict[str, Any]) -> None:
        for path in numbers(document):
            for fake in (float("nan"), float("inf")):
                with pytest.raises(ValidationError):
                    TypeAdapter(kind).validate_json(json.dumps(replaced(document, path, fake)))

    def test_an_unknown_field_is_an_error(self, kind: type, document: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match="Extra inputs"):
            TypeAdapter(kind).validate_json(json.dumps(document | {"min_byte": 1}))


@pytest.mark.parametrize(
    "changes",
    [
        {"offered_bytes": 65537},
        {"offered_bytes": 0},
        {"leases": PRODUCER["leases"] * 2, "offered_bytes": 1 << 20},
        {"leases": [PRODUCER["leases"][0] | {"reclaiming_bytes": 131072}]},
        {"endpoint": "/" + "x" * 107},
        {"producer_id": "a b"},
        {"producer_id": "a/../b"},
        {"transport": "carrier pigeon"},
    ],
)
def test_a_producers_report_adds_up(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ProducerReport.model_validate_json(json.dumps(PRODUCER | changes))


def test_pairings_name_each_consumer_and_each_producer_once() -> None:
    pairing = {"consumer_id": "c", "producers": ["p"]}
    for plan in ([pairing, pairing], [pairing | {"producers": ["p", "p"]}]):
        with pytest.raises(ValidationError, match="only once"):
            PlacementPlan.model_validate_json(json.dumps({"pairings": plan}))


def test_a_message_for_the_other_side_of_the_channel_is_refused() -> None:
    released = b'{"type":"released","slab_id":1,"generation":1}'
    assert CONSUMER_MESSAGES.validate_json(released).type == "released"
    with pytest.raises(ValidationError):
        PRODUCER_MESSAGES.validate_json(released)
